"""Discrete-event simulation: the tasks of all workers played over shared cores and links."""
