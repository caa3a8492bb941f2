"""Recipes and scripts that tests hand to the command line."""
