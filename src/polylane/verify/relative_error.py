"""Relative errors: a difference over a tensor's size, or over its rounding floor where that is larger."""

from __future__ import annotations

import math

from torch import Tensor

from polylane.graph.rounding_noise import MARGIN, max_difference, max_magnitude

# A value is determined if it is more than this many times its rounding floor: then one device, with its sums in another
# order, computes the same first digit again.
DIGIT = 10


def relative_error(expected: Tensor, got: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference over the largest entry of ``expected``, or over ``scale`` if that is larger.

    NaN in the difference gives infinity.
    """
    return divide_by_scale(max_difference(expected, got), max(max_magnitude(expected), scale))


def divide_by_scale(difference: float, scale: float) -> float:
    """Return a difference relative to a scale; NaN, or a difference from a scale of zero, gives infinity."""
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else math.inf


def error_scale(size: float, floor: float, tolerance: float) -> float:
    """Return the denominator of a relative error: a tensor's size, or what rounding makes of it, whichever is larger.

    A difference is then within the tolerance if it is at most ``tolerance`` times the size, or at most ``MARGIN`` times
    the floor.

    Args:
        size: largest entry of the tensor and of the values it was computed from.
        floor: how far the reference is from itself when its sums are in another order.
        tolerance: largest relative error that counts as rounding.
    """
    return max(size, MARGIN * floor / tolerance)


def is_determined(size: float, floor: float) -> bool:
    """Return whether the reference determines a tensor; otherwise all of it may be rounding."""
    return floor == 0.0 or size > DIGIT * floor
