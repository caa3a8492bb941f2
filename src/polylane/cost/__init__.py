"""How long and how much: time, bytes and memory of a plan, as pure functions."""
