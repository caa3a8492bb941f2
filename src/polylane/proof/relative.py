"""Relative errors, as proofs take them."""

from __future__ import annotations

import torch
from torch import Tensor

# A gradient that is zero in truth (a convolution's bias before BatchNorm, a key's bias before softmax) is rounding
# noise in any order of summation: errors are taken relative to a tensor's largest entry, but at least to this share of
# the largest entry of all tensors of its kind.
FLOOR = 1e-3


def relative_error(expected: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected``, or over ``floor`` if larger; nan counts as inf."""
    if expected.numel() == 0:
        return 0.0
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (expected, got))
    if torch.equal(a, b):
        return 0.0
    apart = torch.where(a == b, 0.0, (a - b).abs())  # a mask's infinities are equal, their difference is not a number
    largest = torch.where(a.abs().isinf(), 0.0, a.abs()).max()
    difference, scale = float(apart.max()), max(float(largest), floor)
    return difference / scale if difference == difference and scale > 0 else float("inf")
