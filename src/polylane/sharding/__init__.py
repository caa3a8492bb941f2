"""Intra-operator parallelism, planned: the placement of every operator on one mesh axis, by an integer program."""
