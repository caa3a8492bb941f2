"""Public names of polylane.optim: those of before still read."""

from __future__ import annotations

from polylane import optim


def test_the_name_of_before_is_the_same_function() -> None:
    assert optim.apart is optim.split_decay_groups
