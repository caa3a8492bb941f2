"""Method: how a plan is carried out, as far as time and memory depend on it."""

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
    """What the costs know of how training is done, the runtime's own way by default.

    Attributes:
        dtype: of the passes: "float32", "bfloat16", "float16".
        masters: with 16-bit passes: parameters and optimizer states are float32, and a 16-bit copy of the parameters
            is computed with (autocast, Megatron); without: all is 16-bit ("pure").
        recompute: what is computed again in the backward pass instead of being kept: nothing; what attention keeps
            ("selective": Korthikanti et al., 2022); or all between the inputs of blocks ("full": Chen et al., 2016).
        shard: what replicas hold a part of only: optimizer states, gradients as well, parameters as well (ZeRO-1, -2,
            -3: Rajbhandari et al., 2020; the last is FSDP's FULL_SHARD, the second its SHARD_GRAD_OP).
        overlap: whether gradients are reduced while the backward pass still runs.

    Raises:
        PolylaneError: a word that is none of these.
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
        """How the runtime carries out a plan."""
        return cls(dtype=plan.precision, shard=plan.sync.shard)

    @property
    def float_itemsize(self) -> int:
        """Bytes of an element of a floating-point value in the passes."""
        return ITEM[self.dtype]

    @property
    def is_half_precision(self) -> bool:
        """Whether the passes run in 16 bits."""
        return self.float_itemsize == 2

    @property
    def gradient_collective(self) -> str:
        """The collective over replicas that sums gradients behind the last backward pass; "" where none is left."""
        return {"none": "all_reduce", "parameters": ""}.get(self.shard, "reduce_scatter")

    @property
    def parameter_collective(self) -> str:
        """The collective over replicas that hands out what each of them updated, before the next step; "" for none."""
        return "all_gather" if self.shard in ("optimizer", "gradients") else ""

    def gathers_parameters(self, replicas: int) -> bool:
        """Whether replicas gather parameters, block by block, in every pass."""
        return self.shard == "parameters" and replicas > 1

    def count_updated(self, elements: int, replicas: int) -> int:
        """Of trained elements, those that one replica's optimizer updates."""
        return elements if self.shard == "none" else -(-elements // replicas)
