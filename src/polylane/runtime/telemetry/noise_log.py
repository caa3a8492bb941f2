"""Noise log: the gradient noise scale of a run so far, from the steps in which it was measured."""

from __future__ import annotations

from typing import Any, Protocol

from polylane.efficiency.noise_estimates import NoiseEstimate, population_noise
from polylane.efficiency.noise_window import NoiseScale, NoiseWindow
from polylane.runtime.telemetry.noise_reading import NoiseReading


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

    @property
    def deciding_scale(self) -> NoiseScale:
        """The noise scale of the gradients that the optimizer steps along: as Adam divides them, where it does."""
        adam_scale = self.adam_scale
        return adam_scale if adam_scale.batches else self.scale

    def add(self, step: MeasuredStep) -> dict[str, Any]:
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
