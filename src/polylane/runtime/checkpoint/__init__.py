"""Checkpoints of a running training: what each worker holds of its state, saved and restored by global names.

Its tests are in ``tests/checkpoint``.
"""
