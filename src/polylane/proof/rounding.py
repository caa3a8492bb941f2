"""What rounding can make of a step: one device is run again with its sums in another order, and held against itself.

A key's bias before softmax and a bias before BatchNorm change no loss: their gradients are zero, and what is computed
is the rounding of sums, another number in every order of summation. The mean of what is normalized already is zero in
the same way. How large such numbers may be is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polylane.graph.rounding import TRIES, floor, size
from polylane.proof.relative import over

TRIES_MORE = 16  # where an error is found that rounding might have made


@dataclass(frozen=True)
class Pass:
    """What a forward and backward pass over a batch gives.

    Attributes:
        loss: its mean over the batch.
        gradients: as the optimizer takes them, by parameter.
        buffers: after the pass, by name.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Floors:
    """How far one device's pass is from itself, where its sums are rounded otherwise: absolute, at most.

    Attributes:
        loss: of the loss.
        gradients, buffers: by name; 0 where nothing is told.
    """

    loss: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, float] = field(default_factory=dict)

    def max(self, other: Floors) -> Floors:
        """The larger of both, everywhere."""
        return Floors(
            max(self.loss, other.loss),
            _larger(self.gradients, other.gradients),
            _larger(self.buffers, other.buffers),
        )


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in a.keys() | b.keys()}


# Computes a pass again from the same state; takes the number of the try, and whether samples change places.
Again = Callable[[int, bool], Pass]


def measure(once: Pass, again: Again, tolerance: float, permutes: bool, tries: Sequence[int] = range(TRIES)) -> Floors:
    """The largest difference over some tries, for the loss and every gradient and buffer.

    In each try weights are moved by one unit in the last place (:func:`polylane.graph.rounding.nudge`) and, where that
    is the same function, samples change places within their microbatches.

    Args:
        once: what the reference computed.
        again: computes it once more.
        tolerance: of the proof.
        permutes: whether a sample's place may be without meaning: no random number is drawn by it.
        tries: their numbers.
    """
    floors = Floors()
    for attempt in tries:
        other = again(attempt, permutes)
        if permutes and not _same_function(once, other, tolerance):
            permutes, other = False, again(attempt, False)
        floors = floors.max(_between(once, other))
    return floors


def _same_function(once: Pass, other: Pass, tolerance: float) -> bool:
    """Whether samples that change places leave the loss and the gradient, taken as one vector, as they are."""
    largest = max(map(size, once.gradients.values()), default=0.0)
    found = _between(once, other)
    differences = (over(found.loss, abs(once.loss)), *(over(each, largest) for each in found.gradients.values()))
    return all(difference <= tolerance for difference in differences)


def _between(once: Pass, other: Pass) -> Floors:
    loss = abs(once.loss - other.loss)
    return Floors(
        loss if loss == loss else 0.0,
        _distances(once.gradients, other.gradients),
        _distances(once.buffers, other.buffers),
    )


def _distances(once: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: floor(value, [other[name]]) for name, value in once.items() if name in other}
