"""Choice of gradient compression: builds the compressor that a plan's ``sync`` names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.plan.sync import PowerSGDOptions, SyncOptions
from polylane.runtime.sync.compression.compressor import GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor
from polylane.runtime.sync.compression.top_k import TopKCompressor

WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_REAL = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def choose_compressor(sync: SyncOptions, parameters: Mapping[str, Tensor]) -> GradientCompressor:
    """Build a new gradient compressor for one objective on one worker.

    Args:
        sync: the plan's options of synchronization and compression.
        parameters: parameters whose gradients are summed, by canonical name.

    Raises:
        PolylaneError: a gradient that the plan compresses is not of a real floating-point dtype.
    """
    if sync.wire == "same" and sync.compress is None:
        return GradientCompressor()
    _require_real("sync.wire" if sync.compress is None else "sync.compress", parameters)
    if sync.compress is None:
        return HalfPrecisionCompressor(WIRES[sync.wire])
    if isinstance(sync.compress, PowerSGDOptions):
        return PowerSGDCompressor(sync.compress.rank, sync.compress.start)
    return TopKCompressor(sync.compress.fraction)


def _require_real(key: str, parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in _REAL:
            raise PolylaneError(
                f"{key} takes gradients of real floating-point numbers, and that of {name} is {parameter.dtype}: "
                f"leave {key} out"
            )
