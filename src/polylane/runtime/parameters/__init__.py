"""One worker's parameters and buffers: shards, initial values, updates, and full tensors gathered from shards."""
