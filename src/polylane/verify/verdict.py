"""Verdicts: the outcome of an equivalence check, for each tensor and as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polylane.verify.metrics.metrics_proof import ComparedMetric
from polylane.verify.record import ReferenceRun


@dataclass(frozen=True)
class Deviation:
    """How far one tensor of the plan is from the reference.

    Attributes:
        name: name of the parameter or buffer.
        gradient: worst relative error of its gradient in any step, None where it has none.
        value: worst relative error of the tensor itself after any step, each begun where the reference began it.
        memory: worst relative error of its optimizer state after any step, None where it has none.
    """

    name: str
    gradient: float | None
    value: float
    memory: float | None = None

    @property
    def worst(self) -> float:
        """The largest of the three errors; NaN counts as infinity."""
        errors = (self.value, self.gradient or 0.0, self.memory or 0.0)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


@dataclass(frozen=True)
class FreeRunDeviation:
    """How far a free run, in which each step starts from the plan's own state, ends from the reference: not judged.

    An optimizer may turn gradients that are zero but for rounding into updates, which add up from step to step here.

    Attributes:
        loss_error: worst relative error of a loss.
        worst: largest error of a weight or buffer after the last step, relative to its own size.
        name: name of that weight or buffer; "" where there is no difference.
    """

    loss_error: float
    worst: float
    name: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of an equivalence check.

    Attributes:
        passed: whether all errors are within ``tolerance`` and all replicas hold the same bits.
        plan: the plan in one line.
        workers: processes of the plan, parameter servers of their own included.
        steps: optimizer steps that were trained and compared.
        tolerance: largest relative error that counts as rounding.
        reference: description of the training that the plan is compared with.
        losses: (reference, plan) for each step.
        loss_error: worst relative error of a loss.
        deviations: one for each parameter and buffer, in the model's order.
        worst: the largest relative error of all.
        replicas_equal: whether all workers that hold a weight or buffer hold the same bits.
        culprit: where the two first differ: the first node in graph order whose value differs, or a sentence; or None.
        undetermined: gradients and buffers that are nothing but rounding: the reference itself computes others when its
            sums are in another order. They count neither as equal nor as unequal, unless the plan's are far larger than
            what rounding explains.
        free: the free run, or None where a free run is what was judged.
        rule: the synchronization options, where these do not give the numbers of one device (local SGD, asynchronous
            servers) and the reference follows them as well; else "".
        microbatches: of a step, which the reference takes as well where anything depends on them.
        split: what depends on the microbatches, as a clause; "" where the numbers are those of whole batches.
        whole_loss: where something does, the loss of the first step on its whole batch; None where it is not known.
        metrics: each of the recipe's metrics on both sides, over all batches and a last one of few samples.
    """

    passed: bool
    plan: str
    workers: int
    steps: int
    tolerance: float
    reference: str
    losses: tuple[tuple[float, float], ...]
    loss_error: float
    deviations: tuple[Deviation, ...]
    worst: float
    replicas_equal: bool
    culprit: str | None
    undetermined: tuple[str, ...] = ()
    free: FreeRunDeviation | None = None
    rule: str = ""
    microbatches: int = 1
    split: str = ""
    whole_loss: float | None = None
    metrics: tuple[ComparedMetric, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """What an equivalence check computed, from which its :class:`Verdict` is made.

    Attributes:
        reference: the losses, gradients and states of the reference.
        losses: the plan's, one for each step.
        loss_error: worst relative error of a loss.
        deviations: one for each parameter and buffer, in the model's order.
        held: for each worker, digests of its local weights and buffers, by name and part.
        worst: the largest relative error of all.
        culprit: where the two first differ, None where they do not.
        undetermined: gradients and buffers that are nothing but rounding.
        free: the free run, or None where a free run is what was judged.
    """

    reference: ReferenceRun
    losses: Sequence[float]
    loss_error: float
    deviations: tuple[Deviation, ...]
    held: Sequence[Mapping[str, str]]
    worst: float
    culprit: str | None = None
    undetermined: tuple[str, ...] = ()
    free: FreeRunDeviation | None = None
