"""The pipeline: one worker's program executed action by action, its stages' forward and backward passes."""
