"""Nodes of a captured graph: what other rooms ask of one: its operator, memory, name and line.

Its tests are in ``tests/graph``.
"""
