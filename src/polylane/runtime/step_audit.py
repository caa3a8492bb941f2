"""Step audit: what a job calls around its steps, so that some of them can be compared with one device."""

from __future__ import annotations

from typing import Any, Protocol

from polylane.runtime.step_result import StepResult


class StepAudit(Protocol):
    """What is done around the steps of a job to compare some of them; every worker makes the same calls."""

    def before_step(self, batch: Any, objective: str, epoch: int, samples: int) -> None:
        """Prepare for a step on a batch that begins after some samples of an epoch (from 0)."""

    def after_step(self, result: StepResult) -> None:
        """Go on after the step."""

    def settle(self) -> None:
        """Wait for what is still being compared; raises PolylaneError on all workers for a difference."""

    def close(self) -> None:
        """End whatever compares."""
