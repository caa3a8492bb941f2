"""The user's own Python under export: branches that only raise, functions that draw, modules that cast themselves."""
