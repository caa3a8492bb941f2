"""Connections: the channels and process groups of a plan, and the bytes that cross them.

Its tests are in ``tests/runtime/pipeline`` and ``tests/runtime/sync``.
"""
