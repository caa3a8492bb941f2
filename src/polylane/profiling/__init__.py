"""Measured times of a model on this machine: operators, whole passes, copies that run side by side."""
