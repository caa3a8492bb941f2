"""Checkpoints on disk: tensors by global names and shapes, in files that any plan can read its part of."""
