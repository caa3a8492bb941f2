"""Stragglers: in which steps a rank is slow."""

from __future__ import annotations

from benchmarks.speed.stragglers import Straggler


def test_in_every_step_or_in_one_of_several() -> None:
    assert [Straggler(times=3).factor_at(step, 1) for step in range(3)] == [3, 3, 3]
    assert [Straggler(times=5, every=4).factor_at(step, 1) for step in range(8)] == [1, 5, 1, 1, 1, 5, 1, 1]
    assert [Straggler(times=5, every=4).factor_at(step, 6) for step in range(4)] == [1, 1, 5, 1]
