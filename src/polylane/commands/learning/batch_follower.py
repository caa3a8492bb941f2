"""Batch follower: has a training's batch and its learning rate follow the noise scale, on all workers alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polylane.commands.learning.growing_batch import BatchChange, GrowingBatch
from polylane.commands.learning_rates import LearningRateOptions
from polylane.efficiency.batch_choice import FEWEST_EPOCH_STEPS
from polylane.efficiency.batch_rules import choose_rule
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.job import Job
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.preconditioner import divides_gradients
from polylane.runtime.training_role import TrainingRole


class BatchFollower:
    """The batch of a training, which follows the noise scale.

    Args:
        job: this worker's part in the training, which measures the noise.
        rates: the options of the command line, by which the batch may grow.
        noise: log of the measured steps, the same on every worker.
        population: number of samples of the training data.
        tell: called with a "batch" message for each change.
    """

    def __init__(
        self,
        job: Job,
        rates: LearningRateOptions,
        noise: NoiseLog,
        population: int,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._job, self._noise, self._tell, self._population = job, noise, tell, population
        self._reading: NoiseReading | None = None
        limit = max(population // FEWEST_EPOCH_STEPS, rates.batch)
        largest = min(rates.largest_batch or limit, limit)
        self._growing = GrowingBatch(rates.batch, largest, choose_rule(divides_gradients(job.optimizer)))

    @property
    def batch(self) -> int:
        """Number of samples of a step at present."""
        return self._growing.batch

    def follow(self) -> bool:
        """Look at what was measured last, and return whether the batch has changed; all workers alike."""
        reading = self._noise.reading
        if reading is None or reading is self._reading:
            return False
        self._reading = reading
        self._growing.add_step(reading.costs[1])
        if (change := self._growing.decide(self._noise.scales.deciding)) is None:
            return False
        worker = self._job.worker
        assert isinstance(worker, TrainingRole)
        worker.scale_rates(change.rate_change)
        step = self._job.position.step
        self._tell({"kind": "batch", "step": step, "text": describe_change(step, change), **change.to_dict()})
        return True

    @property
    def next_position(self) -> Position | None:
        """Where the epoch goes on with another batch; None where it is over."""
        position = self._job.position
        return position if position.samples < self._population else None

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on needs, as plain data."""
        return self._growing.state()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch of an earlier run.

        Args:
            state: of that run, see :meth:`state`; empty for one with a fixed batch.
        """
        if state:
            self._growing.resume(state)


def open_follower(
    job: Job,
    rates: LearningRateOptions,
    population: int | None,
    noise: NoiseLog,
    tell: Callable[[dict[str, Any]], None],
) -> BatchFollower | None:
    """Return what has the batch follow the noise scale; None where it is fixed.

    Args:
        job: this worker's part in the training, which measures the noise.
        rates: the options of the command line.
        population: number of samples of the training data; None for a stream.
        noise: log of the measured steps.
        tell: called with a "batch" message for each change.

    Raises:
        PolylaneError: the recipe's scheduler is one whose rates cannot be scaled.
    """
    worker = job.worker
    if rates.largest_batch is None or population is None or not isinstance(worker, TrainingRole):
        return None
    worker.scale_rates(1.0)  # a schedule that cannot be scaled is refused before the first step
    return BatchFollower(job, rates, noise, population, tell)


def describe_change(step: int, change: BatchChange) -> str:
    """Return a change in one sentence.

    Args:
        step: number of steps before it.
        change: of the batch and the learning rate.
    """
    reason = "to measure how fast it is" if change.gain is None else f"{change.gain:.2f} times the goodput is predicted"
    noise = f"{'more than ' * change.is_bound}{change.noise:,.0f}"
    return (
        f"step {step}: batches of {change.batch} samples from here on ({reason}, at a noise scale of {noise}); the "
        f"learning rate is {change.rate_factor:.2f} times what it would be with the first batch"
    )


def check_growth(rates: LearningRateOptions, plan: Plan, population: int | None) -> None:
    """Refuse a batch that is to grow where it cannot, before any worker starts.

    Args:
        rates: the options of the command line.
        plan: the plan of the training.
        population: number of samples of the training data; None for a stream.

    Raises:
        PolylaneError: the batch is to grow, and may not here.
    """
    if rates.largest_batch is None:
        return
    if rates.noise == "off":
        raise PolylaneError("--batch auto follows the gradient noise: leave out --noise off")
    if population is None:
        raise PolylaneError(
            "--batch auto needs data with a length and no sampler, since an epoch goes on with another batch"
        )
    if plan.sync.has_servers or plan.sync.is_replica_local:
        raise PolylaneError(
            "--batch auto needs replicas that make each step together: leave out servers= and every=, or give a --batch"
        )
