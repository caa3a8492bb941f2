"""When checkpoints are due, as texts and by what they cost."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polylane.commands.logs.step_log import StepLog
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.run_control import (
    DEVICE_FAILS_SECONDS,
    FIRST_SECONDS,
    LONGEST_SECONDS,
    MOST_STALL,
    RunControl,
    SaveInterval,
    parse_interval,
)
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.progress_page import UNWATCHED
from polylane.runtime.workers.stop_request import StopRequest

WORLD = SimpleNamespace(progress=UNWATCHED)


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
    newest: None = None

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
        world=WORLD,
        begin_checkpoint=begin,
    )
    stop = StopRequest()
    control = RunControl(job, Path("x"), SaveInterval(steps=3), 3, stop, said.append, dict)
    while not control.is_over:
        position.step += 1
        if position.step == 10:
            stop.set(signal.SIGTERM)
        control._next = position.step  # they agree after every step: how long a step takes is of no interest here
        control.agree()
    assert saver.begun == [3, 6, 9, 10]
    assert said == ["x: the disk is full; training continues, and tries again when the next one is due"]


class SlowSaver:
    """Checkpoints of a run whose files take a number of steps to be on the disk, unless somebody waits for them."""

    under_way: int | None = None
    newest_step, stall_seconds = 0, 0.0

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def is_writing(self) -> bool:
        return self.under_way is not None

    def begin(self, step: int) -> None:
        assert self.under_way is None
        self.under_way = step

    def look(self, step: int) -> None:
        if self.under_way is not None and step - self.under_way >= self.steps:
            self.finish()

    def finish(self) -> None:
        self.newest_step, self.under_way = self.under_way or self.newest_step, None

    def advance(self, own: Any) -> list[Any]:
        return [own]


@pytest.mark.parametrize(("writing", "most"), [(0, 5), (2, 7), (4, 9), (5, 10), (100, 10)])
def test_a_save_waits_for_the_one_before(writing: int, most: int) -> None:
    """What a fault can cost is an interval, and the steps made while a checkpoint is written: an interval at most."""
    saver, job = SlowSaver(writing), SimpleNamespace(position=Position(), apart=False, world=WORLD)
    job.plan, job.open_saver = SimpleNamespace(processes=2), lambda folder, keep: saver
    job.begin_checkpoint = lambda saver, facts: saver.begin(job.position.step)
    control = RunControl(job, Path(), SaveInterval(steps=5), 3, StopRequest(), None, dict)  # type: ignore[arg-type]
    lost = 0
    for step in range(1, 41):
        job.position = Position(step)
        lost = max(lost, step - saver.newest_step)
        saver.look(step)
        control.agree()
        saver.look(step)
    assert lost == most


def test_nobody_saves_what_one_would_not_go_on_from() -> None:
    """A worker knows that a loss is not finite; a dedicated server, which has none, does not."""
    saver, job = SlowSaver(0), SimpleNamespace(position=Position(5), apart=False, world=WORLD)
    job.plan, job.open_saver = SimpleNamespace(processes=2), lambda folder, keep: saver
    control = RunControl(job, Path(), SaveInterval(steps=5), 3, StopRequest(), None, dict)  # type: ignore[arg-type]
    control._saved_step, saver.advance = 0, lambda own: [own, False]  # type: ignore[method-assign]
    control.save(wait=True)
    assert saver.newest_step == 0


def test_a_log_goes_on_with_losses_that_are_no_numbers() -> None:
    log = StepLog(lambda message: None, lambda: 1)
    for value in (math.nan, math.inf, 0.1):
        log.loss, log._sum = value, value
        state = json.loads(json.dumps(log.state(), allow_nan=False))
        again = StepLog(lambda message: None, lambda: 1)
        again.resume(state)
        again.begin_epoch()
        assert repr([again.loss, again._sum]) == repr([value, value])
