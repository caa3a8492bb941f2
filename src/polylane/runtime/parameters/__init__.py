"""One worker's parameters and buffers: its shards, first values, updates, and whole tensors again."""
