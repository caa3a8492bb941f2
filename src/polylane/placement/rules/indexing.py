"""Operators that pick, cut and join."""
