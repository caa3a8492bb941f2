"""Mutation testing: deliberate bugs, planted one at a time, that `verify` and the tests must notice (`make mutants`)."""
