"""When checkpoints are due, as texts and by what they cost."""

from __future__ import annotations

import math

import pytest

from polylane.commands.running.run_control import (
    DEVICE_FAILS_SECONDS,
    FIRST_SECONDS,
    LONGEST_SECONDS,
    MOST_STALL,
    SaveInterval,
    parse_interval,
)
from polylane.errors import PolylaneError


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500", SaveInterval(steps=500)),
        ("30s", SaveInterval(seconds=30)),
        ("10m", SaveInterval(seconds=600)),
        ("1.5h", SaveInterval(seconds=5400)),
        ("auto", SaveInterval()),
    ],
)
def test_intervals_are_steps_or_times(text: str, interval: SaveInterval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize("text", ["", "0", "0m", "1.5", "-3", "10 m", "often", "9" * 50, "1d"])
def test_others_are_one_sentence(text: str) -> None:
    with pytest.raises(PolylaneError, match=r"--save-every .*: give a number of steps \(500\), a time"):
        parse_interval(text)


def test_automatic_intervals_are_youngs_within_bounds() -> None:
    auto = SaveInterval()
    assert auto.due_seconds(0, 0.0, 2) == FIRST_SECONDS
    for cost in (1e-3, 0.1, 5.0):
        for workers in (2, 1000):
            due = auto.due_seconds(4, 4 * cost, workers)
            assert cost / due <= MOST_STALL + 1e-12
            young = math.sqrt(2 * cost * DEVICE_FAILS_SECONDS / workers)
            assert due == pytest.approx(max(cost / MOST_STALL, min(young, LONGEST_SECONDS)))
    assert auto.due_seconds(1, 0.1, 10_000) < auto.due_seconds(1, 0.1, 1_000)
