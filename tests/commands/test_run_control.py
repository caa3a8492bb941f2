"""When checkpoints are due, as texts and by what they cost."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polylane.commands.running.run_control import (
    DEVICE_FAILS_SECONDS,
    FIRST_SECONDS,
    LONGEST_SECONDS,
    MOST_STALL,
    RunControl,
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


@dataclass
class FullDisk:
    """A saver none of whose checkpoints can be written, as is heard when the next one is to be begun."""

    begun: list[int] = field(default_factory=list)
    is_writing: bool = False

    def advance(self, own: Any) -> list[Any]:
        return [own]

    def finish(self) -> None:
        if self.is_writing:
            self.is_writing = False
            raise PolylaneError("the disk is full")


def test_a_checkpoint_is_begun_whenever_one_is_due_whatever_became_of_the_one_before() -> None:
    """Beginning one empties a pipeline without a flush: its numbers would depend on the disk otherwise."""
    saver, said = FullDisk(), list[str]()
    position = SimpleNamespace(step=0)

    def begin(saver: FullDisk, facts: Any) -> None:
        saver.begun.append(position.step)
        saver.is_writing = True

    job: Any = SimpleNamespace(
        open_saver=lambda folder, keep: saver,
        apart=False,
        plan=SimpleNamespace(processes=1),
        position=position,
        world=SimpleNamespace(progress=SimpleNamespace(during=lambda phase: nullcontext())),
        begin_checkpoint=begin,
    )
    control = RunControl(job, Path("x"), SaveInterval(steps=3), 3, lambda: position.step == 10, said.append, dict)
    while not control.is_over:
        position.step += 1
        control._next = position.step  # they agree after every step: how long a step takes is of no interest here
        control.agree()
    assert saver.begun == [3, 6, 9, 10]
    assert said == ["the disk is full; the training goes on"] * 4
