"""NCCL without GPUs: a backend that records what would be launched on which stream, and the laws of its records."""
