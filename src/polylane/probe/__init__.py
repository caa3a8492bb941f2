"""Measuring a machine: devices, links and contention, fitted into a cluster file."""
