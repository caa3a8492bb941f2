"""Benchmarks: ratios, both sides in one run, alternating, medians."""
