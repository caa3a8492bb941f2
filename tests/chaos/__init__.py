"""Chaos: trainings into which faults are injected, each held against the unbroken one."""
