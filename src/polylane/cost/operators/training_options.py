"""Training options: precision, recomputation and overlap, as far as time and memory depend on them.

What replicas share out and how often they agree is not here: the plan says it (`polylane.plan.sync`).
"""

from __future__ import annotations

from dataclasses import dataclass

from polylane.errors import PolylaneError
from polylane.plan.options import PlanOptions
from polylane.plan.recompute import MODES, Mode

# Bytes of an element of a floating-point value in passes of each precision.
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class TrainingOptions:
    """How a plan is trained; the defaults are the runtime's.

    Attributes:
        dtype: dtype of the passes: "float32", "bfloat16", "float16" or "float64".
        masters: for 16-bit passes, whether parameters and optimizer states are float32 and the passes use a 16-bit copy
            (autocast, Megatron); else all is 16-bit ("pure").
        recompute: what the backward pass recomputes instead of saving it: "none"; "selective", attention (Korthikanti
            et al., 2022); "full", everything but the inputs of blocks (Chen et al., 2016).
        overlap: whether gradients are reduced while the backward pass still runs.
        compiled: whether stages are compiled. Their times and memory are taken to be those of the operators one by one:
            compiled code is usually faster and smaller, by how much is not predicted.

    Raises:
        PolylaneError: dtype or recompute is not one of its choices.
    """

    dtype: str = "float32"
    masters: bool = True
    recompute: Mode = "none"
    overlap: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        options = (("dtype", tuple(ITEM)), ("recompute", MODES))
        for name, choices in options:
            if getattr(self, name) not in choices:
                raise PolylaneError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(choices)}")

    @classmethod
    def of(cls, plan: PlanOptions) -> TrainingOptions:
        """Return the options with which the runtime trains a plan."""
        return cls(dtype=plan.precision, compiled=plan.compile)

    @property
    def float_itemsize(self) -> int:
        """Bytes per floating-point element in the passes."""
        return ITEM[self.dtype]

    @property
    def is_half_precision(self) -> bool:
        """Whether the passes run in a 16-bit dtype."""
        return self.float_itemsize == 2
