"""What is known of a training's steps, what is told of them, and how it ended."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polylane.observe.timeline import Timeline
from polylane.runtime.job import Job
from polylane.runtime.pipeline.step_result import StepResult
from polylane.runtime.transport.serialization import serializable

Tell = Callable[[dict[str, Any]], None]

# Of the last steps with a full batch the one of median duration is kept as representative.
LATE_STEPS = 15

# Of replicas that go at their own pace the last so many are shown beside each other.
LAST_STEPS = 4


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training ended, the same on every worker (but for the clock).

    Attributes:
        plan: how the training was split, in one line.
        steps, samples, seconds: done, tests not counted.
        loss: of the last step's batch, before that step.
        train_loss: mean over the last epoch's samples.
        test_loss: at the end, None without test data.
        samples_per_second: over all steps but the first, in which connections are made.
        timeline: of a representative late step.
        staleness: how many updates of parameter servers were how stale; None where they are synchronous, or are none.
        stopped: the step and the epoch at which the loss was no number and training stopped.
        not_finite: the same, whether or not training stopped.
        bad_loss: the loss of the step that ``stopped`` or ``not_finite`` names.
        cause: where that began, as far as is known.
        saved: whether the weights were: not where they are no numbers.
        traffic: bytes that every worker sent in a step, see :meth:`polylane.Job.traffic`.
        servers: of the workers, how many only serve parameters: the last ones.
    """

    plan: str
    steps: int
    samples: int
    seconds: float
    loss: float
    train_loss: float
    test_loss: float | None
    samples_per_second: float
    timeline: Timeline
    staleness: dict[int, int] | None
    stopped: tuple[int, int] | None
    traffic: tuple[Mapping[str, float], ...] = ()
    servers: int = 0
    not_finite: tuple[int, int] | None = None
    bad_loss: float = math.nan
    cause: str = ""
    saved: bool = True


@serializable
@dataclass(frozen=True)
class EpochLosses:
    """What one worker knows of an epoch: its losses as (total, count), its time, and when a loss was no number."""

    total: float
    count: float
    epoch_seconds: float
    seconds: float
    stopped: tuple[int, int] | None


class StepLog:
    """What is known of the steps so far.

    The loss of a step is summed over the workers while the next ones run; it is read once the slowest worker has come
    to it as well, so that nobody waits for that.
    """

    def __init__(self, tell: Tell, slack: Callable[[], int]) -> None:
        self._tell = tell
        self._slack = slack
        self._waiting: deque[Callable[[], None]] = deque()
        self._late: deque[tuple[float, StepResult]] = deque(maxlen=LATE_STEPS)
        self._full = 0  # samples of a full batch
        self._first: tuple[int, float] = (0, 0.0)  # samples and seconds of the first step
        self.launched = self.samples = 0
        self.seconds = 0.0
        self.loss = math.nan
        self.stopped: tuple[int, int] | None = None
        self.bad_loss = math.nan
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Start the clock of the epoch's first step, and the epoch's means."""
        self._mark = time.perf_counter()
        self._sum, self._count, self._epoch_seconds = 0.0, 0.0, 0.0

    def add(self, result: StepResult, epoch: int, learning_rate: float | None, staleness: int | None = None) -> None:
        """A step was done: tell of an earlier one."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        while len(self._waiting) >= self._slack():
            self._waiting.popleft()()
        self.launched += 1
        self.samples += result.samples
        self.seconds += seconds
        self._epoch_seconds += seconds
        if self.launched == 1:
            self._first = (result.samples, seconds)
        if result.samples > self._full:
            self._full = result.samples
            self._late.clear()
        if result.samples == self._full:
            self._late.append((seconds, result))
        self._waiting.append(
            partial(self._read_result, result, self.launched, epoch, seconds, learning_rate, staleness)
        )

    def complete(self) -> None:
        """Read and tell the loss of all steps."""
        while self._waiting:
            self._waiting.popleft()()

    def _mean(self) -> float:
        return self._sum / self._count if self._count else math.nan

    def epoch_losses(self) -> EpochLosses:
        """What this worker knows of the epoch."""
        return EpochLosses(self._sum, self._count, self._epoch_seconds, self.seconds, self.stopped)

    def merge_epoch(self, every: Sequence[EpochLosses]) -> None:
        """The epoch is that of all workers: their mean loss, the slowest one's time; where one must stop, all do."""
        if every:  # none are left where the others have ended already
            self._sum, self._count = sum(each.total for each in every), sum(each.count for each in every)
            self._epoch_seconds = max(each.epoch_seconds for each in every)
            self.seconds = max(each.seconds for each in every)
            self.stopped = min((each.stopped for each in every if each.stopped is not None), default=None)

    def _read_result(
        self,
        result: StepResult,
        step: int,
        epoch: int,
        seconds: float,
        learning_rate: float | None,
        staleness: int | None,
    ) -> None:
        total, count = result.sums
        if math.isnan(count):  # a worker that only serves knows of no loss
            return
        self.loss = result.loss
        self._sum += total
        self._count += count
        if self.stopped is None and not math.isfinite(self.loss):
            self.stopped, self.bad_loss = (step, epoch), self.loss
        self._tell(
            {
                "kind": "step",
                "step": step,
                "epoch": epoch,
                "loss": self.loss,
                "samples": result.samples,
                "seconds": seconds,
                "samples_per_second": result.samples / seconds,
                "learning_rate": learning_rate,
                **({} if staleness is None else {"staleness": staleness}),
            }
        )

    def epoch_means(self) -> dict[str, float]:
        """Mean loss over the samples of the epoch so far, and the time its steps took."""
        return {"train_loss": self._mean(), "seconds": self._epoch_seconds}

    def outcome(self, plan: str, test_loss: float | None, stopped: bool) -> TrainingOutcome:
        """How it ended."""
        rest = (self.samples - self._first[0], self.seconds - self._first[1])
        samples, seconds = rest if self.launched > 1 else self._first
        return TrainingOutcome(
            plan=plan,
            steps=self.launched,
            samples=self.samples,
            seconds=self.seconds,
            loss=self.loss,
            train_loss=self._mean(),
            test_loss=test_loss,
            samples_per_second=samples / seconds,
            timeline=_representative(self._late),
            staleness=None,
            stopped=self.stopped if stopped else None,
            not_finite=self.stopped,
            bad_loss=self.bad_loss,
        )


def _representative(late: Sequence[tuple[float, StepResult]]) -> Timeline:
    median = statistics.median_low(seconds for seconds, _ in late)
    result = next(result for seconds, result in late if seconds == median)
    timeline = result.timeline
    return replace(
        timeline, title=f"measured · step {result.step + 1}", notes={**timeline.notes, "step": str(result.step + 1)}
    )


def last_steps(job: Job, done: int) -> Timeline:
    """What all workers did at the end, each at its own pace."""
    steps = min(done, LAST_STEPS)
    timeline = job.timeline(steps)
    said = f"{done - steps + 1} to {done}"
    return replace(timeline, title=f"measured · steps {said}", notes={**timeline.notes, "step": said})
