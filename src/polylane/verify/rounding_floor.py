"""Rounding floors, and errors relative to them.

A rounding floor is how far one device is from itself when it computes a step again with its sums in another order. An
error is a difference over a tensor's size, or over its rounding floor where that is larger.

A key's bias before softmax and a bias before BatchNorm change no loss: their gradients are zero, and what is computed
is the rounding of sums, another number in every order of summation. The mean of values that are normalized already is
zero in the same way. How large such numbers may be is measured, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polylane.graph.rounding_noise import MARGIN, TRIES, max_difference, max_magnitude, rounding_floor

TRIES_MORE = 16  # tries of a step in which a difference was found that may be rounding

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


@dataclass(frozen=True)
class MeasuredPass:
    """The results of a forward and backward pass over a batch.

    Attributes:
        loss: mean over the batch's samples.
        gradients: as the optimizer gets them (clipped), by parameter.
        buffers: values after the pass, by name.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class RoundingFloors:
    """Largest absolute differences between passes of one device whose sums are rounded in different ways.

    Attributes:
        loss: floor of the batch's mean loss.
        gradients: floors of gradients by parameter; a name that is missing has floor 0.
        buffers: floors of buffers by name; a name that is missing has floor 0.
    """

    loss: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, float] = field(default_factory=dict)

    def elementwise_max(self, floors: RoundingFloors) -> RoundingFloors:
        """Return floors that are everywhere the larger ones of both."""
        return RoundingFloors(
            max(self.loss, floors.loss),
            _merge_larger(self.gradients, floors.gradients),
            _merge_larger(self.buffers, floors.buffers),
        )

    def multiply(self, factor: float) -> RoundingFloors:
        """Return floors that are so many times as large."""
        gradients = {name: floor * factor for name, floor in self.gradients.items()}
        return RoundingFloors(self.loss * factor, gradients, {n: floor * factor for n, floor in self.buffers.items()})


def _merge_larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in a.keys() | b.keys()}


# Computes a pass again from the same state; takes the number of the try, and whether samples are permuted. None: the
# model does not run with its samples permuted.
Again = Callable[[int, bool], MeasuredPass | None]


def measure_floors(
    once: MeasuredPass, remeasure: Again, tolerance: float, permutes: bool, tries: Sequence[int] = range(TRIES)
) -> RoundingFloors:
    """Return the largest difference over some tries, for the loss and every gradient and buffer.

    In each try weights are moved by one unit in the last place (:func:`polylane.graph.rounding_noise.nudge_values`)
    and, where that is the same function, samples are permuted within their microbatches.

    Args:
        once: the pass that the reference computed.
        remeasure: computes it once more, with other rounding.
        tolerance: largest relative error that counts as rounding.
        permutes: whether samples may be permuted: no random number depends on a sample's place.
        tries: numbers of the tries, which seed the changes.
    """
    floors = RoundingFloors()
    for attempt in tries:
        nudged_pass = remeasure(attempt, permutes)
        # A loss may depend on the order of its samples (position-dependent targets): its floors are then measured
        # without permutations, or they would hide errors.
        if permutes and (nudged_pass is None or not _same_function(once, nudged_pass, tolerance)):
            permutes, nudged_pass = False, remeasure(attempt, False)
        assert nudged_pass is not None
        floors = floors.elementwise_max(_floors_between(once, nudged_pass))
    return floors


def _same_function(once: MeasuredPass, nudged_pass: MeasuredPass, tolerance: float) -> bool:
    """Return whether permuted samples leave the loss and the gradient, taken as one vector, as they are."""
    largest = max(map(max_magnitude, once.gradients.values()), default=0.0)
    floors = _floors_between(once, nudged_pass)
    differences = (
        divide_by_scale(floors.loss, abs(once.loss)),
        *(divide_by_scale(floor, largest) for floor in floors.gradients.values()),
    )
    return all(difference <= tolerance for difference in differences)


def _floors_between(once: MeasuredPass, nudged_pass: MeasuredPass) -> RoundingFloors:
    loss = abs(once.loss - nudged_pass.loss)
    return RoundingFloors(
        loss if loss == loss else 0.0,  # a NaN is no floor: it would excuse every difference
        _tensor_distances(once.gradients, nudged_pass.gradients),
        _tensor_distances(once.buffers, nudged_pass.buffers),
    )


def _tensor_distances(once: Mapping[str, Tensor], nudged: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: rounding_floor(value, [nudged[name]]) for name, value in once.items() if name in nudged}
