"""WHAT EACH WORKER DOES: its actions and its part of the graph."""
