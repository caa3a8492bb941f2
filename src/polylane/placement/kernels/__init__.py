"""What a rank runs where an operator is split: ring attention, halo exchange, sharded norms and reductions."""
