"""Noise log: the gradient noise scale of a run so far, from the steps in which it was measured."""

from __future__ import annotations

from typing import Any, Protocol

from polylane.commands.learning_rates import NoiseMode
from polylane.compile.compiled_training import CompiledTraining
from polylane.efficiency.noise_estimates import NoiseEstimate, population_noise
from polylane.efficiency.noise_window import NoiseScale, NoiseWindow
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.telemetry.noise_reading import NoiseReading
from polylane.runtime.telemetry.part_layout import couples_replicas, why_not_measured
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

    Attributes:
        reading: of the latest step that was measured; None before the first.
    """

    def __init__(self, population: int | None = None) -> None:
        self._population = population
        self._plain, self._adam = NoiseWindow(), NoiseWindow()
        self.reading: NoiseReading | None = None

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
        self.reading = reading
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


def check_noise(mode: NoiseMode, prepared: CompiledTraining) -> None:
    """Refuse to measure the gradient noise where the plan does not allow it, before any worker starts.

    Args:
        mode: the option of the command line; "auto" measures nothing there.
        prepared: the training, compiled for its plan.

    Raises:
        PolylaneError: "on", and it cannot be measured.
    """
    if mode == "on" and (reason := _why_not(prepared)) is not None:
        raise PolylaneError(f"--noise on: {reason}")


def measure_noise(mode: NoiseMode, job: Job, prepared: CompiledTraining) -> None:
    """Begin to measure the gradient noise of a training, where that is asked for and the plan allows it.

    Args:
        mode: the option of the command line.
        job: this worker's part in the training, before its first step.
        prepared: the training, compiled for its plan.
    """
    worker = job.worker
    if mode != "off" and isinstance(worker, TrainingRole) and _why_not(prepared) is None:
        worker.telemetry.noise.turn_on(every_step=mode == "on")


def _why_not(prepared: CompiledTraining) -> str | None:
    plan, graph = prepared.plan, prepared.main_partition.graph
    return why_not_measured(plan, couples_replicas(plan, graph, prepared.batch_is_sharded))
