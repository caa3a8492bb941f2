"""Bridges: a plan for the trainers of other libraries."""
