"""Errors, as proofs take them: relative to a tensor's size, and to what rounding in the reference can make of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# How much further a plan's sums may be apart from one device's than one device is from itself in a few tries. On
# transformers, convolutions and LSTMs it was 6 times at most. Gradients that are not zero were more than 1e14 times
# larger than what one device was apart from itself, those that are zero 4 times at most.
MARGIN = 100.0

# A value whose first digit one device does not get twice is not determined by it.
DIGIT = 10


def apart(expected: Tensor, got: Tensor) -> float:
    """The largest difference of two tensors' elements; nan and other shapes count as inf."""
    if expected.shape != got.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    a, b = _wide(expected), _wide(got)
    if torch.equal(a, b):
        return 0.0
    difference = float(torch.where(a == b, 0.0, (a - b).abs()).max())  # infinities of a mask are equal
    return difference if difference == difference else math.inf


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def size(tensor: Tensor) -> float:
    """Its largest element; infinities are no size."""
    if tensor.numel() == 0:
        return 0.0
    sizes = _wide(tensor).abs()
    return float(torch.where(sizes.isinf(), 0.0, sizes).max())


def relative_error(expected: Tensor, got: Tensor, scale: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected``, or over ``scale`` if larger; nan counts as inf."""
    return over(apart(expected, got), max(size(expected), scale))


def over(difference: float, scale: float) -> float:
    """A difference as a share of a scale; nan counts as inf."""
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else math.inf


def scale_of(size: float, floor: float, tolerance: float) -> float:
    """What an error is relative to: a tensor's size, or what rounding makes of it, whichever is larger.

    A difference is then within the tolerance if it is so small a share of the size, or within ``MARGIN`` times the
    floor.

    Args:
        size: of the tensor, and of what it was made of.
        floor: how far the reference is from itself, summed in another order.
        tolerance: largest relative error that counts as rounding.
    """
    return max(size, MARGIN * floor / tolerance)


def determined(size: float, floor: float) -> bool:
    """Whether the reference itself knows a tensor: all of it may be rounding otherwise."""
    return floor == 0.0 or size > DIGIT * floor
