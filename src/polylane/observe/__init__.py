"""Observation: the timeline of a step, theoretical, predicted or measured, and its swimlane."""
