"""Training options: precision, sharding, recomputation and overlap, as far as time and memory depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]

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
        shard: what is sharded over replicas: "optimizer" states, "gradients" as well, "parameters" as well (ZeRO-1, -2,
            -3: Rajbhandari et al., 2020; the last two are FSDP's SHARD_GRAD_OP and FULL_SHARD).
        overlap: whether gradients are reduced while the backward pass still runs.

    Raises:
        PolylaneError: dtype, recompute or shard is not one of its choices.
    """

    dtype: str = "float32"
    masters: bool = True
    recompute: Recompute = "none"
    shard: Sharding = "none"
    overlap: bool = True

    def __post_init__(self) -> None:
        known = (("dtype", tuple(ITEM)), ("recompute", get_args(Recompute)), ("shard", get_args(Sharding)))
        for name, choices in known:
            if getattr(self, name) not in choices:
                raise PolylaneError(f"{name} {getattr(self, name)!r}: choose one of {', '.join(choices)}")

    @classmethod
    def of(cls, plan: Spec | Plan) -> TrainingOptions:
        """Return the options with which the runtime trains a plan."""
        return cls(dtype=plan.precision, shard=plan.sync.shard)

    @property
    def float_itemsize(self) -> int:
        """Bytes per floating-point element in the passes."""
        return ITEM[self.dtype]

    @property
    def is_half_precision(self) -> bool:
        """Whether the passes run in a 16-bit dtype."""
        return self.float_itemsize == 2

    @property
    def gradient_collective(self) -> str:
        """Collective over replicas that reduces gradients after the last backward pass; "" if the passes do it."""
        return {"none": "all_reduce", "parameters": ""}.get(self.shard, "reduce_scatter")

    @property
    def parameter_collective(self) -> str:
        """Collective over replicas that distributes updated parameters before the next step; "" for none."""
        return "all_gather" if self.shard in ("optimizer", "gradients") else ""

    def gathers_parameters(self, replicas: int) -> bool:
        """Return whether replicas gather parameters block by block in every pass (ZeRO-3)."""
        return self.shard == "parameters" and replicas > 1

    def count_updated(self, elements: int, replicas: int) -> int:
        """Return how many of the trained elements one replica's optimizer updates."""
        return elements if self.shard == "none" else -(-elements // replicas)
