"""Sharding rules: which strategies each torch operator has on the ranks of a mesh axis.

A rule's docstring says what the operator computes, with shapes where they matter, and which dimensions may be sharded.
"""
