"""Evaluation: forward passes over a dataset, metrics that are exact over all of it, and predictions in its order."""
