"""Callbacks: what a user's code, or an option, does at the start, the steps, the tests and the end of a training."""
