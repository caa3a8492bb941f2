"""Accumulation dtype: half-precision values are summed in float32, as torch itself does."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return torch.float32 if dtype in HALF else dtype


def upcast(x: Tensor) -> Tensor:
    """Return a value in the dtype in which it is summed."""
    return x.to(accumulation_dtype(x.dtype))
