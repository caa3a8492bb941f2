"""Kept steps: of all steps of a training the few whose timelines are shown, and why each of them."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace
from typing import Protocol

from polylane.observe.timeline import Timeline
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.worker_facts import WorkerFacts

# The typical step is the one of median duration among this many last steps with a full batch.
LATE_STEPS = 15


class LoggedStep(Protocol):
    """What a log takes of a step: a :class:`.StepResult`, or what several of them make up."""

    @property
    def step(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def sums(self) -> tuple[float, float]: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def facts(self) -> tuple[WorkerFacts, ...]: ...
    @property
    def noise(self) -> NoiseReading | None: ...


class KeptSteps:
    """The first step, the slowest, a typical and the last one; steps of incomplete batches are none of the last two."""

    def __init__(self) -> None:
        self._first: LoggedStep | None = None
        self._slowest: tuple[float, LoggedStep] | None = None
        self._late: deque[tuple[float, LoggedStep]] = deque(maxlen=LATE_STEPS)
        self._full = 0

    def add(self, seconds: float, result: LoggedStep) -> None:
        """Add a step.

        Args:
            seconds: duration of the step, with what was waited for before it.
            result: the step, whose timeline is read only if it is kept.
        """
        if self._first is None:  # connections are made in it: its duration is no measure of the others
            self._first = result
        elif self._slowest is None or seconds > self._slowest[0]:
            self._slowest = seconds, result
        # Only full batches are representative: a short last batch, or a first one that is shorter, is not kept.
        if result.samples > self._full:
            self._full = result.samples
            self._late.clear()
        if result.samples == self._full:
            self._late.append((seconds, result))

    def typical(self) -> Timeline:
        """Return the timeline of the step of median duration among the last ones."""
        # The low median is one of the durations, so that there is a step with it.
        median = statistics.median_low(seconds for seconds, _ in self._late)
        result = next(result for seconds, result in self._late if seconds == median)
        return _describe_step(result, f"the median of the last {len(self._late)} steps" if len(self._late) > 1 else "")

    def timelines(self) -> dict[str, Timeline]:
        """Return the timelines of the kept steps, by what each of them is: first, slowest, typical, last."""
        candidates = {
            "first": (self._first, "the first step: connections are made, and code is compiled"),
            "slowest": (None if self._slowest is None else self._slowest[1], "the slowest step but the first"),
        }
        shown = {
            name: _describe_step(result, reason) for name, (result, reason) in candidates.items() if result is not None
        }
        shown["typical"] = self.typical()
        return shown | {"last": _describe_step(self._late[-1][1], "the last step with a whole batch")}


def _describe_step(result: LoggedStep, reason: str) -> Timeline:
    timeline, number = result.timeline, str(result.step + 1)
    notes = {**timeline.notes, "step": number, **({"reason": reason} if reason else {})}
    return replace(timeline, title=f"measured · step {number}", notes=notes)
