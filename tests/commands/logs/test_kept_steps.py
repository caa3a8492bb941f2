"""Kept steps: of the first, the slowest, a typical and the last step each is the one that its name says."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from polylane.commands.logs.kept_steps import LATE_STEPS, KeptSteps
from polylane.observe.timeline import Timeline
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.worker_facts import WorkerFacts


@dataclass(frozen=True)
class Step:
    step: int
    samples: int = 8
    loss: float = math.nan
    sums: tuple[float, float] = (0.0, 0.0)
    timeline: Timeline = field(default_factory=lambda: Timeline((), 2, notes={"clock": "host"}))
    facts: tuple[WorkerFacts, ...] = ()
    noise: NoiseReading | None = None


def keep(steps: list[tuple[float, int]]) -> dict[str, Timeline]:
    """Return the timelines of steps with these durations and samples."""
    kept = KeptSteps()
    for number, (seconds, samples) in enumerate(steps):
        kept.add(seconds, Step(number, samples))
    return kept.timelines()


def numbers_of(timelines: dict[str, Timeline]) -> dict[str, int]:
    return {name: int(timeline.notes["step"]) for name, timeline in timelines.items()}


def test_each_step_is_what_its_name_says() -> None:
    """The first step is slow for a reason of its own, and is not the slowest."""
    timelines = keep([(9.0, 8), (1.0, 8), (3.0, 8), (2.0, 8), (1.5, 8)])
    assert numbers_of(timelines) == {"first": 1, "slowest": 3, "typical": 4, "last": 5}
    typical = timelines["typical"]
    assert typical.title == "measured · step 4" and typical.notes["clock"] == "host"
    assert typical.notes["reason"] == "the median of the last 5 steps"


def test_steps_of_incomplete_batches_are_neither_typical_nor_last() -> None:
    timelines = keep([(9.0, 3), (1.0, 8), (2.0, 8), (3.0, 8), (0.1, 5)])
    assert numbers_of(timelines) == {"first": 1, "slowest": 4, "typical": 3, "last": 4}


def test_the_typical_step_is_one_of_the_late_ones() -> None:
    early, late = [(5.0 + number, 8) for number in range(30)], [(1.0 + number, 8) for number in range(LATE_STEPS)]
    assert numbers_of(keep([*early, *late]))["typical"] == 30 + (LATE_STEPS + 1) // 2


def test_a_single_step_is_all_but_the_slowest() -> None:
    timelines = keep([(1.0, 8)])
    assert numbers_of(timelines) == {"first": 1, "typical": 1, "last": 1} and "reason" not in timelines["typical"].notes
