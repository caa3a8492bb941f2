"""What sums are kept in where values come in a half-precision type, as torch itself does."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums of values of a type are kept in."""
    return torch.float32 if dtype in HALF else dtype


def upcast(x: Tensor) -> Tensor:
    """A value in the type that its sums are kept in."""
    return x.to(accumulation_dtype(x.dtype))
