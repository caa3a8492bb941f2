"""Gradient synchronization over replicas: all-reduce, ZeRO, local SGD, parameter servers."""
