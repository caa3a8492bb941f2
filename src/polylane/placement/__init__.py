"""Operator parallelism, one operator: placements (Replicate, Shard, Partial), strategies, redistribution, rewriting."""
