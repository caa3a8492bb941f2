"""Noise log: the gradient noise scale of a run so far, from the steps in which it was measured."""

from __future__ import annotations

from typing import Any, Protocol

from polylane.efficiency.noise_estimates import NoiseEstimate
from polylane.efficiency.noise_window import NoiseScales, NoiseWindows
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
        self._windows = NoiseWindows()
        self.reading: NoiseReading | None = None

    @property
    def scales(self) -> NoiseScales:
        """The noise scales so far."""
        return self._windows.measure()

    def add(self, step: MeasuredStep) -> dict[str, Any]:
        """Add a step, and return the object ``noise`` of its line in metrics.jsonl; empty if it was not measured.

        Args:
            step: one whose loss is known; steps come in order.
        """
        if (reading := step.noise) is None or (estimate := reading.estimate(self._population)) is None:
            return {}
        self.reading = reading
        scaled = reading.estimate(self._population, preconditioned=True)
        self._windows.add(estimate, scaled)
        scales = self.scales
        columns = {
            **_name_estimate(estimate),
            "parts": reading.parts,
            "population": self._population,
            **scales.plain.to_dict(),
        }
        if scaled is not None:
            columns["adam"] = {**_name_estimate(scaled), **scales.adam.to_dict()}
        return {"noise": columns}


def _name_estimate(estimate: NoiseEstimate) -> dict[str, Any]:
    return {"step_g2": estimate.gradient, "step_s": estimate.spread}
