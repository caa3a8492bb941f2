"""Operators of our own that a captured graph calls: keyed random numbers, synchronized batch norm, whole-batch
counts.
"""
