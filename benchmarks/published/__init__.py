"""Predictions beside what others measured, and their recordings."""
