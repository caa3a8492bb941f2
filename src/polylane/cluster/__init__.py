"""Cluster topology: devices and links as a tree (device < host < rack < site), read from a file or one line."""
