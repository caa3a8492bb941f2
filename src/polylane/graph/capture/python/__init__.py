"""The user's own Python under export: calls that stay whole, branches that only raise, functions that draw."""
