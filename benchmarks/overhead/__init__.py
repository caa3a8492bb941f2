"""What checks, checkpoints, audits, observing and preparing cost a training."""
