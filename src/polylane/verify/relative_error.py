"""Errors, as proofs take them: relative to a tensor's size, and to what rounding in the reference can make of it."""

from __future__ import annotations

import math

from torch import Tensor

from polylane.graph.rounding_noise import MARGIN, max_difference, max_magnitude

# A value whose first digit one device does not get twice is not determined by it.
DIGIT = 10


def relative_error(expected: Tensor, got: Tensor, scale: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected``, or over ``scale`` if larger; nan counts as inf."""
    return divide_by_scale(max_difference(expected, got), max(max_magnitude(expected), scale))


def divide_by_scale(difference: float, scale: float) -> float:
    """A difference as a share of a scale; nan counts as inf."""
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else math.inf


def error_scale(size: float, floor: float, tolerance: float) -> float:
    """What an error is relative to: a tensor's size, or what rounding makes of it, whichever is larger.

    A difference is then within the tolerance if it is so small a share of the size, or within ``MARGIN`` times the
    floor.

    Args:
        size: of the tensor, and of what it was made of.
        floor: how far the reference is from itself, summed in another order.
        tolerance: largest relative error that counts as rounding.
    """
    return max(size, MARGIN * floor / tolerance)


def is_determined(size: float, floor: float) -> bool:
    """Whether the reference itself knows a tensor: all of it may be rounding otherwise."""
    return floor == 0.0 or size > DIGIT * floor
