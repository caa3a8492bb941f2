"""Step log: the losses and times of a training's steps, the messages about them, and the outcome of the training."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from polylane.commands.logs.kept_steps import KeptSteps, LoggedStep
from polylane.commands.logs.step_columns import StepColumns
from polylane.observe.timeline import Timeline
from polylane.runtime.job import Job
from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.verify.audit.audit_report import AuditReport

Tell = Callable[[dict[str, Any]], None]

# Asynchronous replicas have no common step: this many last steps are shown instead.
LAST_STEPS = 4


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of a training, the same on every worker but for times.

    Attributes:
        plan: the plan that was trained, in one line.
        steps: number of optimizer steps, over all epochs.
        samples: number of samples of all steps.
        seconds: duration of all steps, tests not counted.
        loss: of the last step's batch, before that step's update.
        train_loss: mean over the last epoch's samples.
        test_loss: mean over the test data at the end, None without test data.
        samples_per_second: over all steps but the first, in which connections are made.
        timeline: the spans of a representative late step.
        timelines: those of all steps that are shown, by what each of them is; see :class:`.KeptSteps`.
        shares: of the time of all workers, see :meth:`.StepColumns.means`; empty where no step was observed.
        staleness: staleness -> number of parameter servers' updates with it; None without asynchronous servers.
        stopped: (step, epoch) in which the loss was not finite and training stopped.
        not_finite: (step, epoch) in which the loss was not finite, whether or not training stopped.
        bad_loss: the loss of the step that ``stopped`` or ``not_finite`` names.
        cause: description of the operator where that began, as far as it is known.
        saved: whether the weights were saved; they are not where some are not finite.
        ended_early: whether a signal asked the training to end before its last step.
        checkpoint: folder of the newest checkpoint that the run has written; empty for none.
        stall_seconds: time that checkpoints have cost the training.
        traffic: bytes that every worker sent in a step, see :meth:`polylane.Job.traffic`.
        servers: number of dedicated parameter servers, which are the last workers.
        audit: what audits of its steps have found; None where they were off.
        test_metrics: the recipe's metrics over the test data at the end, by name.
        stop_reason: why a callback has ended the training; empty where none has.
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
    ended_early: bool = False
    checkpoint: str = ""
    stall_seconds: float = 0.0
    audit: AuditReport | None = None
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    shares: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TestResult:
    """What a test has found.

    Attributes:
        loss: mean over the test data; None before the first test.
        metrics: the recipe's metrics over the test data, by name.
        seconds: duration of the test.
    """

    __test__ = False  # pytest takes classes of this name for its own

    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def list_results(self) -> dict[str, float]:
        """Return loss and metrics by name; empty where nothing was tested."""
        return {} if self.loss is None else {"test_loss": self.loss, **self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """Return what the message of an epoch says of it."""
        if self.loss is None:
            return {"test_loss": None}
        metrics = {"metrics": dict(self.metrics)} if self.metrics else {}
        return {"test_loss": self.loss, **metrics, "evaluation_seconds": self.seconds}


@serializable
@dataclass(frozen=True)
class EpochLosses:
    """One worker's losses of an epoch.

    Attributes:
        total: sum of the losses, each over its step's samples.
        count: number of samples (or what the loss counts) in ``total``.
        epoch_seconds: duration of the epoch's steps.
        seconds: duration of all steps so far.
        stopped: (step, epoch) in which the loss was not finite; None where all were finite.
    """

    total: float
    count: float
    epoch_seconds: float
    seconds: float
    stopped: tuple[int, int] | None


class StepLog:
    """Log of the steps so far.

    The loss of a step is summed over the workers during later steps. It is read some steps later, when the slowest
    worker has come to it as well, so that no worker waits for it.

    Args:
        tell: called with each message, as plain data.
        slack: returns the number of steps that may be in flight before a loss is read.
        columns: describes observed steps, on the worker whose messages are written; None elsewhere.
        noise: follows the steps whose gradient noise is measured; default: a new one.
    """

    def __init__(
        self, tell: Tell, slack: Callable[[], int], columns: StepColumns | None = None, noise: NoiseLog | None = None
    ) -> None:
        self._tell = tell
        self._slack, self.columns = slack, columns
        self.noise = NoiseLog() if noise is None else noise
        self._waiting: deque[Callable[[], None]] = deque()
        self._kept = KeptSteps()
        self._first: tuple[int, float] = (0, 0.0)  # samples and seconds of the first step
        self.launched = self.samples = 0
        self.seconds = 0.0
        self.loss = math.nan
        self.stopped: tuple[int, int] | None = None
        self.bad_loss = math.nan
        self._resumed_at, self._resumed_epoch = 0, (0.0, 0.0, 0.0)
        self.begin_epoch()

    @property
    def has_made_steps(self) -> bool:
        """Whether this run itself has made a step."""
        return self.launched > self._resumed_at

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on after these steps needs, as plain data; all losses have been read."""
        return {
            "steps": self.launched,
            "samples": self.samples,
            "seconds": self.seconds,
            "loss": _to_json(self.loss),
            "epoch": [_to_json(value) for value in (self._sum, self._count, self._epoch_seconds)],
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on after the steps of an earlier run.

        Args:
            state: of that run's log, see :meth:`state`.
        """
        self.launched = self._resumed_at = int(state["steps"])
        self.samples, self.seconds = int(state["samples"]), float(state["seconds"])
        self.loss = float(state["loss"])
        total, count, seconds = map(float, state["epoch"])
        self._resumed_epoch = (total, count, seconds)

    def begin_epoch(self) -> None:
        """Start the clock of the epoch's first step, and the epoch's means."""
        self._mark = time.perf_counter()
        # The first epoch of a run that goes on has begun before.
        self._sum, self._count, self._epoch_seconds = self._resumed_epoch
        self._resumed_epoch = (0.0, 0.0, 0.0)

    def add(
        self,
        result: LoggedStep,
        epoch: int | None,
        rates: Sequence[float],
        staleness: int | None = None,
        tokens: int = 0,
    ) -> None:
        """Add a finished step, and send the message about an earlier one.

        Args:
            result: the step's samples, its loss (still being summed) and its timeline.
            epoch: number of the epoch, from 1; None where nobody counts them.
            rates: learning rates of the optimizer's groups; empty where it has none.
            staleness: of the step's gradients; None without asynchronous servers.
            tokens: of the batch; 0 where it has none.
        """
        moment = time.perf_counter()
        seconds, self._mark = moment - self._mark, moment
        while len(self._waiting) >= self._slack():
            self._waiting.popleft()()
        self.launched += 1
        self.samples += result.samples
        self.seconds += seconds
        self._epoch_seconds += seconds
        if self.launched == self._resumed_at + 1:
            # Connections are made in it. What an earlier run did is no measure of this one's speed either.
            self._first = (self.samples, self.seconds)
        self._kept.add(seconds, result)
        message = {
            "kind": "step",
            "step": self.launched,
            **({} if epoch is None else {"epoch": epoch}),
            "loss": math.nan,  # until it is read
            "samples": result.samples,
            "seconds": seconds,
            "samples_per_second": result.samples / seconds,
            "learning_rate": rates[0] if rates else None,
            **({"learning_rates": list(rates)} if len(set(rates)) > 1 else {}),
            **({} if staleness is None else {"staleness": staleness}),
            **({"tokens": tokens, "tokens_per_second": tokens / seconds} if tokens else {}),
        }
        self._waiting.append(partial(self._read_loss, result, message))

    def complete(self) -> None:
        """Read the loss of all steps, and send the messages about them."""
        while self._waiting:
            self._waiting.popleft()()

    def _mean(self) -> float:
        return self._sum / self._count if self._count else math.nan

    def epoch_losses(self) -> EpochLosses:
        """Return this worker's losses of the epoch."""
        return EpochLosses(self._sum, self._count, self._epoch_seconds, self.seconds, self.stopped)

    def merge_epoch(self, epochs: Sequence[EpochLosses]) -> None:
        """Make the epoch that of all workers: their mean loss, the slowest worker's time, and the earliest stop."""
        if epochs:  # empty where the other workers have ended already
            self._sum, self._count = sum(epoch.total for epoch in epochs), sum(epoch.count for epoch in epochs)
            self._epoch_seconds = max(epoch.epoch_seconds for epoch in epochs)
            self.seconds = max(epoch.seconds for epoch in epochs)
            self.stopped = min((epoch.stopped for epoch in epochs if epoch.stopped is not None), default=None)

    def _read_loss(self, result: LoggedStep, message: dict[str, Any]) -> None:
        """Read the loss of a step, and send the message about it."""
        total, count = result.sums
        if math.isnan(count):  # a dedicated server has no loss
            return
        self.loss = message["loss"] = result.loss
        message |= self.noise.add(result)
        self._sum += total
        self._count += count
        if self.stopped is None and not math.isfinite(self.loss):
            self.stopped, self.bad_loss = (message["step"], message.get("epoch", 0)), self.loss
        self._tell(message if self.columns is None else message | self.columns.add(result))

    def epoch_means(self) -> dict[str, float]:
        """Return the mean loss over the samples of the epoch so far, and the duration of its steps."""
        return {"train_loss": self._mean(), "seconds": self._epoch_seconds}

    def outcome(self, plan: str, test_loss: float | None, stopped: bool) -> TrainingOutcome:
        """Return the outcome of the training.

        Args:
            plan: the plan that was trained, in one line.
            test_loss: mean over the test data, None without test data.
            stopped: whether a loss that is not finite stops the training.
        """
        remainder = (self.samples - self._first[0], self.seconds - self._first[1])
        samples, seconds = remainder if self.launched > self._resumed_at + 1 else self._first
        return TrainingOutcome(
            plan=plan,
            steps=self.launched,
            samples=self.samples,
            seconds=self.seconds,
            loss=self.loss,
            train_loss=self._mean(),
            test_loss=test_loss,
            samples_per_second=samples / seconds,
            timeline=self._kept.typical(),
            timelines=self._kept.timelines(),
            shares={} if self.columns is None else self.columns.means(),
            staleness=None,
            stopped=self.stopped if stopped else None,
            not_finite=self.stopped,
            bad_loss=self.bad_loss,
        )


def _to_json(number: float) -> float | str:
    """Return a number as JSON has it, which has no NaN or infinity: these are texts that ``float`` reads."""
    return number if math.isfinite(number) else str(number)


def last_steps(job: Job, step_count: int) -> Timeline:
    """Return the timeline of all workers' last steps, each at its own pace."""
    steps = min(step_count, LAST_STEPS)
    timeline = job.timeline(steps)
    step_range = f"{step_count - steps + 1} to {step_count}"
    return replace(timeline, title=f"measured · steps {step_range}", notes={**timeline.notes, "step": step_range})
