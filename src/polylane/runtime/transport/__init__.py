"""How tensors travel between workers: one interface (protocol.py), a file per way."""
