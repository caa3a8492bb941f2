"""Operators of polylane's own in captured graphs: keyed random numbers, synchronized batch norm, whole-batch counts."""
