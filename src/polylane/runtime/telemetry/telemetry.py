"""Telemetry: one worker's part in observing steps, and its results that are still being summed.

What an accelerator has not computed yet stays a tensor, for which nobody waits.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from polylane.diagnosis.page_layout import Phase
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Timeline
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.progress_page import OUTER_PHASES
from polylane.runtime.span_clock import TimedSpan
from polylane.runtime.step_result import STEPS_KEPT, Groups, StepResult, StepState
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.telemetry.noise_meter import NoiseMeter
from polylane.runtime.telemetry.observed_steps import ObservedSteps
from polylane.runtime.telemetry.worker_facts import SLOTS, WorkerFacts
from polylane.runtime.workers.world import World

# Part of what observing costs that its own clock sees, and not those who wait for who observes: it was 0.6 and 0.7
# where a GPT's steps with and without it took turns (docs/results).
SEEN_SHARE = 0.5

Numbers = list[float | Tensor]  # of all workers, by rank


class Telemetry:
    """One worker's part in observing steps.

    Args:
        world: this worker, among those that train.
        local_model: what it has of the model, before the first step.
        has_norms: whether all stages have the gradients of one batch at a time, so that these have a norm.

    Attributes:
        noise: measures the gradient noise of some steps, once it is turned on.
    """

    def __init__(self, world: World, local_model: LocalModel, has_norms: bool) -> None:
        self._rank, self._size, self._device, self._progress = world.rank, world.size, world.device, world.progress
        self._steps, self._is_observing = ObservedSteps(), False
        self.noise = NoiseMeter(local_model)
        self._no_gradients = 0.0 if has_norms else math.nan
        self._squared_norm: float | Tensor = 0.0
        self._loss_scale: float | Tensor = 0.0
        self._cost, self._loading, self._excluded_seconds, self._count = 0.0, 0.0, 0.0, 0
        self._since = time.perf_counter()
        # What the process has of its own, torch among it, is not the training's.
        held_bytes = sum(tensor.nbytes for tensor in local_model.local_tensors().values())
        self._base = resident_bytes() - held_bytes if self._device.type == "cpu" else 0
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Context manager around what is done for the sake of observing alone."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._cost += time.perf_counter() - begin

    def begin_step(self, step: int) -> None:
        """Decide whether a step is observed; all workers alike.

        Args:
            step: number of the step, from 0.
        """
        self._is_observing = self._steps.begin_step(step)
        self._squared_norm, self._loss_scale, self._count = self._no_gradients, 0.0, self._count + 1

    def note_gradients(self, update: ObjectiveUpdate) -> None:
        """Note the gradients of the step, which are complete, and not clipped."""
        if self._is_observing:
            with self.timing():
                self._squared_norm = self._squared_norm + update.squared_norm()
                if update.loss_scale is not None:  # a copy: the update may change it
                    self._loss_scale = update.loss_scale.scale.clone()

    def collect(self, state: StepState, steps: Sequence[Sequence[TimedSpan]]) -> Numbers:
        """Return the slots of all workers, with zeros for the others; empty where the step is not observed.

        Args:
            state: of this worker in the step.
            steps: spans of the steps before it, of which an accelerator has ended the oldest.
        """
        if not self._is_observing:
            return []
        begin = time.perf_counter()
        total, count = state.sums(self._device).unbind()
        spans = state.spans if self._device.type == "cpu" or not steps else steps[0]
        lane = Timeline(tuple(span.resolve() for span in spans), self._size)
        spent = account_time(lane).ranks[self._rank]  # alone, it cannot be told what it waits for
        loading = self._progress.phase_seconds(Phase.LOADING)
        excluded_seconds = sum(map(self._progress.phase_seconds, OUTER_PHASES))
        numbers = (total, count, self._squared_norm, self._loss_scale)
        facts: Numbers = [0.0] * (SLOTS * self._size)
        facts[SLOTS * self._rank : SLOTS * (self._rank + 1)] = [
            *(float(number) if self._device.type == "cpu" else number for number in numbers),
            float(self._peak_bytes()),
            (loading - self._loading) / self._count,
            (begin - self._since - (excluded_seconds - self._excluded_seconds)) / self._count,
            float(self._count),
            self._cost + time.perf_counter() - begin,
            spent.computing,
            spent.communication,
            lane.makespan(),
        ]
        self._loading, self._excluded_seconds = loading, excluded_seconds
        self._since, self._count, self._cost = begin, 0, 0.0
        return facts

    def follow(self, facts: Sequence[WorkerFacts]) -> None:
        """Learn what an observed step has cost; all workers do so before the same step."""
        if facts:
            cost = max(fact.cost for fact in facts) / SEEN_SHARE
            self._steps.follow_cost(cost, max(fact.seconds for fact in facts))

    def _peak_bytes(self) -> int:
        if self._device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self._device)
        return peak_resident_bytes() - self._base


class StepsInFlight:
    """The latest steps of this worker, whose results it has not waited for.

    Args:
        telemetry: learns from each result, before the same step on every worker.

    Attributes:
        spans: of this worker's latest steps, the oldest first.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._results, self._telemetry = deque[StepResult](), telemetry
        self.spans = deque[tuple[TimedSpan, ...]](maxlen=STEPS_KEPT)
        self._latest: StepResult | None = None

    def add(self, result: StepResult, spans: Iterable[TimedSpan]) -> None:
        """Add the result of a step that has been made, and this worker's spans of it."""
        self._results.append(result)
        self.spans.append(tuple(spans))
        self._latest = result

    @property
    def groups(self) -> Groups:
        """The groups of ranks of the latest step's reduces; none before the first step."""
        return {} if self._latest is None else self._latest.groups

    def limit(self, count: int) -> None:
        """Wait until fewer than ``count`` steps are in flight."""
        while len(self._results) >= count:
            result = self._results.popleft()
            result.wait_complete()
            self._telemetry.follow(result.facts)
            self._telemetry.noise.follow(result.noise)


def resident_bytes() -> int:
    """Return the resident memory of this process, in bytes; its peak where the system does not tell more."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
