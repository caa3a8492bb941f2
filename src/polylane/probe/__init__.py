"""MEASURE IT: operators, messages and workers side by side -> a cluster; a recipe's own nodes -> a profile."""
