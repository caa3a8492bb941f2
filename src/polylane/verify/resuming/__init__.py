"""Proof of checkpoints: a training that goes on from one is the training that was never interrupted."""
