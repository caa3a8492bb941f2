"""Pooling, padding and interpolation."""
