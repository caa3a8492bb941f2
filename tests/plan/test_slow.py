"""Stragglers: in which steps a rank is slow."""

from __future__ import annotations

from polylane.plan.slow import Slow, of_words, words


def test_in_every_step_or_in_one_of_several() -> None:
    assert [Slow(times=3).at(step, 1) for step in range(3)] == [3, 3, 3]
    assert [Slow(times=5, every=4).at(step, 1) for step in range(8)] == [1, 5, 1, 1, 1, 5, 1, 1]
    assert [Slow(times=5, every=4).at(step, 6) for step in range(4)] == [1, 1, 5, 1]


def test_words() -> None:
    slow = {0: Slow(times=5, every=4), 3: Slow(times=1.5)}
    assert words(slow) == ["slow=0:5@4+3:1.5"] and words({}) == []
    assert of_words("0:5@4+3:1.5") == slow
