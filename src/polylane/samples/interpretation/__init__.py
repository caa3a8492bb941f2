"""Abstract interpretation of a graph: how the samples of a batch make up every value, for all inputs.

Its tests are in ``tests/samples``.
"""
