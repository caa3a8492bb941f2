"""Tensor parallelism of one operator: placements (Replicate, Shard, Partial), strategies, redistribution, rewriting."""
