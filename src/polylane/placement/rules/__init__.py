"""Sharding rules: which strategies each torch operator has on the ranks of a mesh axis."""
