"""Where a script is in its epochs and batches, and its checkpoints, from which it goes on at the next batch."""
