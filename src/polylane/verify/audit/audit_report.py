"""Audit report: what the audits of a run have found, in data and in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from polylane.errors import format_plural
from polylane.runtime.plain_data.serialization import serializable


@serializable
@dataclass(frozen=True)
class AuditReport:
    """What the audits of a run have found.

    Attributes:
        steps: numbers of the audited steps, from 1.
        worst: the largest relative difference of all.
        differences: a sentence for each step that differs.
        of_own_code: whether the user's own code was run in all of them, and not its captured graph.
        note: why no step was audited, or none from some step on; "" for no reason.
        stall_seconds: time that audits have cost the training.
    """

    steps: tuple[int, ...] = ()
    worst: float = 0.0
    differences: tuple[str, ...] = ()
    of_own_code: bool = True
    note: str = ""
    stall_seconds: float = 0.0

    def __str__(self) -> str:
        if not self.steps:
            return f"not audited: {self.note}" if self.note else "not audited"
        prefix = f"audited at {format_plural(len(self.steps), 'step')}"
        if self.differences:
            text = f"{prefix}: {len(self.differences)} differed from one device"
        elif self.worst:
            text = f"{prefix}: the same numbers as one device (largest difference {self.worst:.0e}, rounding)"
        else:
            text = f"{prefix}: the same numbers as one device, bit for bit"
        text += "" if self.of_own_code else ", replayed from the captured graph instead of your own code"
        return f"{text}; not audited further: {self.note}" if self.note else text
