"""Noise log: the gradient noise scale of a run so far, from the steps in which it was measured."""

from __future__ import annotations

from typing import Any, Protocol

from polylane.commands.learning_rates import NoiseMode
from polylane.efficiency.noise_estimates import NoiseEstimate, population_noise
from polylane.efficiency.noise_window import NoiseScale, NoiseWindow
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.runtime.job import Job
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.part_layout import why_not_measured
from polylane.runtime.training_role import TrainingRole


class MeasuredStep(Protocol):
    """A step that may have been measured."""

    @property
    def noise(self) -> NoiseReading | None:
        """The norms of the gradients of its batch's parts; None where they were not measured."""


class NoiseLog:
    """The latest measured steps; the same on every worker that adds the same steps.

    Args:
        population: number of samples of the training data, of which an epoch draws each once; None where samples come
            from a stream, or are drawn in another way.
    """

    def __init__(self, population: int | None = None) -> None:
        self._population = population
        self._plain, self._adam = NoiseWindow(), NoiseWindow()

    @property
    def scale(self) -> NoiseScale:
        """The noise scale of gradients as they are."""
        return self._plain.measure()

    @property
    def adam_scale(self) -> NoiseScale:
        """The noise scale of gradients as Adam divides them; of no batches with other optimizers."""
        return self._adam.measure()

    def describe(self, step: MeasuredStep) -> dict[str, Any]:
        """Add a step, and return the object ``noise`` of its line in metrics.jsonl; empty if it was not measured.

        Args:
            step: one whose loss is known; steps come in order.
        """
        if (reading := step.noise) is None or (estimate := self._estimate(reading, False)) is None:
            return {}
        self._plain.add(estimate)
        columns: dict[str, Any] = {
            "step_g2": estimate.gradient,
            "step_s": estimate.spread,
            "parts": reading.parts,
            **self._plain.measure().to_dict(),
        }
        if (scaled := self._estimate(reading, True)) is not None:
            self._adam.add(scaled)
            columns["adam"] = {
                "step_g2": scaled.gradient,
                "step_s": scaled.spread,
                **self._adam.measure().to_dict(),
            }
        return {"noise": columns}

    def _estimate(self, reading: NoiseReading, preconditioned: bool) -> NoiseEstimate | None:
        estimate = reading.estimate(self._population, preconditioned)
        if estimate is None or self._population is None:
            return estimate
        return NoiseEstimate(estimate.gradient, population_noise(estimate.spread, self._population))


def check_noise(mode: NoiseMode, plan: Plan, batch_is_sharded: bool) -> None:
    """Refuse to measure the gradient noise where the plan does not allow it, before any worker starts.

    Args:
        mode: the option of the command line; "auto" measures nothing there.
        plan: the plan of the training.
        batch_is_sharded: whether replicas shard operators along the batch, because the loss couples samples.

    Raises:
        PolylaneError: "on", and it cannot be measured.
    """
    if mode == "on" and (reason := why_not_measured(plan, batch_is_sharded)) is not None:
        raise PolylaneError(f"--noise on: {reason}")


def measure_noise(mode: NoiseMode, job: Job, batch_is_sharded: bool) -> None:
    """Begin to measure the gradient noise of a training, where that is asked for and the plan allows it.

    Args:
        mode: the option of the command line.
        job: this worker's part in the training, before its first step.
        batch_is_sharded: whether replicas shard operators along the batch, because the loss couples samples.
    """
    worker = job.worker
    if mode != "off" and isinstance(worker, TrainingRole) and why_not_measured(job.plan, batch_is_sharded) is None:
        worker.telemetry.noise.turn_on(every_step=mode == "on")
