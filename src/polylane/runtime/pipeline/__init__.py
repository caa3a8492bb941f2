"""Pipeline execution: one worker's program, action by action, with the forward and backward passes of its stage."""
