"""Kernels of split operators: ring attention, halo exchange, sharded normalizations and reductions."""
