"""Equivalence check (``polylane verify``): a plan's training against that of one device, step by step, in float64."""
