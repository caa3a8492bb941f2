"""Readings: what a loss asks of a batch or of its own draws, kept with a graph, which holds for the same answers."""
