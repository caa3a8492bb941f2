"""Operators that only rearrange."""
