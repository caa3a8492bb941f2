"""The cost model: seconds, bytes and memory of a plan, as pure functions."""
