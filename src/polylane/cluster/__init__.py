"""Devices and the links between them, as a tree (device < host < rack < site): data, read from a file or one line."""
