"""Verdicts: what a proof found, tensor by tensor, and as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polylane.verify.record import ReferenceRun


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the reference.

    Attributes:
        name: the parameter or buffer.
        gradient: worst relative error of its gradient in any step, None where it has none.
        value: worst relative error of the tensor itself after any step, each begun where the reference began it.
        memory: worst relative error of its optimizer's state after any step, None where it has none.
    """

    name: str
    gradient: float | None
    value: float
    memory: float | None = None

    @property
    def worst(self) -> float:
        """The largest; nan counts as inf."""
        return max(map(nan_last, (self.value, self.gradient or 0.0, self.memory or 0.0)))


@dataclass(frozen=True)
class FreeRunDeviation:
    """All steps run once more, each from where the plan's own last one had ended. Told, not judged.

    What an optimizer makes of gradients that are zero but for rounding goes on from step to step here.

    Attributes:
        loss_error: worst relative error of a loss.
        worst: largest error of a weight or buffer after the last step, relative to its own size.
        name: of that weight or buffer; "" where there is no difference.
    """

    loss_error: float
    worst: float
    name: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a proof.

    Attributes:
        passed: whether everything agrees to ``tolerance``.
        reference: what the plan was held against.
        losses: per step (reference, plan).
        loss_error: worst relative error of a loss.
        deviations: per parameter and buffer, in the model's order.
        worst: the largest relative error of all.
        replicas_equal: whether all workers that hold a weight or buffer hold the same bits.
        culprit: where the two part ways: the first node in graph order whose value differs, or a sentence; or None.
        undetermined: gradients and buffers that are rounding and nothing else: the reference itself, with its sums in
            another order, does not find them again. They are neither equal nor unequal, unless the plan's are far
            outside of what rounding makes of them.
        free: the steps run freely, or None where that is what was judged.
        rule: by which replicas agree, where that is not the numbers of one device: the reference follows it as well.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """What a proof came to; see :class:`Verdict`."""

    reference: ReferenceRun
    losses: Sequence[float]
    loss_error: float
    deviations: tuple[Deviation, ...]
    held: Sequence[Mapping[str, str]]
    worst: float
    culprit: str | None = None
    undetermined: tuple[str, ...] = ()
    free: FreeRunDeviation | None = None


def nan_last(error: float) -> float:
    """For the largest of errors, of which nan is the worst."""
    return error if error == error else math.inf
