"""Connections: the channels and process groups of a plan, and the bytes that cross them."""
