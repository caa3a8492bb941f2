"""What a model's Python asks of the data while it is captured: answered from the example, asked of each batch again.

Its tests are in ``tests/graph/capture`` and ``tests/equivalence``.
"""
