"""Tensor and sequence parallelism, planned: the placement of every operator by an integer program (intra-operator)."""
