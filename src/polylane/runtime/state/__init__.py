"""State: what a worker holds of a training, by global names: weights, optimizer state, Python state, plain values.

Its tests are in ``tests/checkpoint``.
"""
