"""Timelines and what is made of them."""
