"""Measuring a model where it is: operators one by one, whole passes, copies that share a host."""
