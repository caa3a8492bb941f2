"""Callbacks of a running training: called on every worker, their wish to end agreed on, and the best steps saved."""
