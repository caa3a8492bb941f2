"""Mutation testing: bugs planted on purpose, which `verify` and the tests must notice (`make mutants`)."""
