"""Passes audit: the passes of some steps of a prepared script are made a second time, on whole weights, and compared.

What follows from a step's gradients is the script's: it may clip them, add others, or step never. Compared are the loss
and the gradients that a plan's programs have computed, with those of the script's own calls on one device, which every
worker makes for itself before the step:

    pass    1        2    3    4              8
            audit    -    -    audit          -         powers of two, as far as they fit into the budget
    workers gather weights, replay; compute by the plan; compare each its part; exchange what they found
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polylane.errors import AuditFailed, describe_error
from polylane.graph.rounding_noise import COARSE_MARGIN, MARGIN, max_difference, max_magnitude
from polylane.graph.sparse_gradients import densify
from polylane.runtime.plain_data.serialization import serializable
from polylane.verify.audit import AuditMode
from polylane.verify.audit.audit_report import AuditReport
from polylane.verify.audit.schedule import BUDGET
from polylane.verify.audit.step_replay import TOLERANCES
from polylane.verify.rounding_floor import (
    MeasuredPass,
    RoundingFloors,
    divide_by_scale,
    error_scale,
    measure_floors,
    relative_error,
)

# Makes the passes of the step again, with weights nudged by the number of a try; None: with the weights as they are.
Replay = Callable[[int | None], MeasuredPass]
MOST_TOLERANCE = 1e-3  # beyond it COARSE_MARGIN is that of floors
TakePart = Callable[[str, Tensor], Tensor | None]


@serializable
@dataclass(frozen=True)
class _Report:
    """What one worker has to say of an audited step.

    Attributes:
        error: its largest relative difference.
        name: of the gradient that it is of; "" for the loss.
        note: why no step can be audited; "" where it was.
    """

    error: float = 0.0
    name: str = ""
    note: str = ""


@dataclass
class PassesAudit:
    """One worker's part in the audits of a script; every worker makes the same calls.

    Args:
        mode: whether, and how often, steps are audited, and what follows from a difference.
        exchange: returns what all workers give, by rank.
        plan: the plan, in a sentence about a difference.
        tolerance: largest relative difference that counts as rounding without a measurement.
        say: is called with the reason why steps are not audited, where no command says that at its end.

    Attributes:
        note: why no further step is audited; "" where some are.
        count: number of passes so far.
        seconds: time that audits have taken.
        steps: numbers of the audited passes, from 1.
        worst: the largest relative difference of all.
        differences: a sentence for each pass that differs.
        agreed: number of the last pass that agreed; 0: none has.
    """

    mode: AuditMode
    exchange: Callable[[Any], list[Any]]
    plan: str
    tolerance: float
    note: str = ""
    say: Callable[[str], None] = lambda sentence: None
    count: int = 0
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    worst: float = 0.0
    differences: list[str] = field(default_factory=list)
    agreed: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self._warn_of_note()

    def _warn_of_note(self) -> None:
        if self.note and self.mode != "off":
            self.say(f"steps are not audited: {self.note}")

    def is_due(self) -> bool:
        """Count a pass; return whether it is to be audited, on all workers alike."""
        self.count += 1
        if self.note or self.mode == "off" or self.count & (self.count - 1):
            return False
        if not self.steps or self.mode == "stop":
            return True
        estimate = self.seconds + self.seconds / len(self.steps)
        return bool(self.exchange(estimate <= BUDGET * (time.perf_counter() - self.started))[0])

    def replay(self, replay: Replay) -> MeasuredPass | None:
        """Make the passes of a step before the plan does; None where that cannot be done on all workers."""
        started, report, measured = time.perf_counter(), _Report(), None
        try:
            measured = replay(None)
        except Exception as error:  # of the user's own code, made a second time
            report = _Report(note=describe_error(error).partition("\n")[0])
        reports: list[_Report] = self.exchange(report)
        self.note = next((report.note for report in reports if report.note), "")
        self._warn_of_note()
        self.seconds += time.perf_counter() - started
        return None if self.note else measured

    def compare(
        self,
        measured: MeasuredPass,
        loss: float,
        gradients: Mapping[str, Tensor],
        take: TakePart,
        replay: Replay,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compare what a plan has computed with the passes that were made before.

        Args:
            measured: the loss, and whole gradients.
            loss: that of the plan.
            gradients: what this worker has of the plan's gradients, by name of the parameter.
            take: returns this worker's part of a whole gradient; None where it has none.
            replay: makes the passes again, where a difference may be rounding.
            dtype: the least precise type that the pass casts numbers to; None: it casts none.

        Raises:
            AuditFailed: on all workers, if the plan has computed something else, and that is to stop the training.
        """
        started = time.perf_counter()
        tolerance = self.tolerance if dtype is None else max(self.tolerance, TOLERANCES[dtype])
        self.steps.append(self.count)
        report = self._find_worst(measured, loss, gradients, take, RoundingFloors(), tolerance, dtype)
        if not report.error <= tolerance:
            floors = measure_floors(measured, lambda attempt, permuted: replay(attempt), tolerance, False)
            if tolerance > MOST_TOLERANCE:
                floors = floors.multiply(COARSE_MARGIN / MARGIN)
            report = self._find_worst(measured, loss, gradients, take, floors, tolerance, dtype)
        self.worst = max(self.worst, report.error)
        self.seconds += time.perf_counter() - started
        if report.error <= tolerance:
            self.agreed = self.count
        else:
            self._tell_difference(report)

    def _find_worst(
        self,
        measured: MeasuredPass,
        loss: float,
        gradients: Mapping[str, Tensor],
        take: TakePart,
        floors: RoundingFloors,
        tolerance: float,
        casts_to: torch.dtype | None,
    ) -> _Report:
        """Return the largest difference of all workers."""
        worst = _Report()
        if measured.loss == measured.loss or loss == loss:  # NaN differs from itself
            scale = error_scale(abs(measured.loss), floors.loss, tolerance)
            worst = _Report(relative_error(torch.tensor(measured.loss), torch.tensor(loss), scale))
        for name in {**measured.gradients, **gradients}:  # where one has none, the other one's must be zero
            gradient, local_gradient = measured.gradients.get(name), gradients.get(name)
            expected = None if gradient is None else take(name, gradient)
            if gradient is None and local_gradient is not None:
                gradient = expected = torch.zeros_like(densify(local_gradient))
            if gradient is None or expected is None:
                continue
            expected, gradient = densify(expected), densify(gradient)
            computed = torch.zeros_like(expected) if local_gradient is None else densify(local_gradient)
            are_finite = bool(gradient.isfinite().all()), bool(computed.isfinite().all())
            # One device has no numbers either; in float16 the sum of a batch may overflow, and not those of its parts.
            if not any(are_finite) or (casts_to == torch.float16 and not all(are_finite)):
                continue
            difference = max_difference(expected.reshape(computed.shape), computed)
            scale = error_scale(max_magnitude(gradient), floors.gradients.get(name, 0.0), tolerance)
            error = divide_by_scale(difference, scale)
            worst = worst if error <= worst.error else _Report(error, name)
        reports: list[_Report] = self.exchange(worst)
        return max(reports, key=lambda report: report.error)

    def _tell_difference(self, report: _Report) -> None:
        subject = f"the gradient of {report.name}" if report.name else "the loss"
        self.differences.append(
            f"the plan {self.plan} does not compute what one device computes: {subject} of backward pass {self.count} "
            f"differs (largest relative difference {report.error:.1e}, more than rounding)"
            + (f"; pass {self.agreed} was the last that agreed" if self.agreed else "")
        )
        if self.mode == "warn":
            warnings.warn(self.differences[-1], stacklevel=2)
            return
        self.note = "a pass differed"
        raise AuditFailed(
            f"{self.differences[-1]}; this is a fault of polylane, please report it: polylane verify shows where, and "
            "audit='warn' continues"
        )

    def report(self) -> AuditReport:
        """Return what was found."""
        return AuditReport(
            steps=tuple(self.steps),
            worst=self.worst,
            differences=tuple(self.differences),
            note=self.note,
            stall_seconds=round(self.seconds, 3),
        )
