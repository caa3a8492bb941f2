"""Shared-memory transport between the workers of one host: messages, blocks, and sums over them."""
