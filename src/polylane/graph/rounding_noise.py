"""What rounding can make of a value: it is computed again from numbers that differ by one unit in the last place.

The backward error of a sum is as if its terms were that far off (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, chapter 3). What comes out as another number then is rounding and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# How much further sums in another order may be apart from one device's than one device is from itself in a few tries.
# On transformers, convolutions and LSTMs it was 6 times at most. Gradients that are not zero were more than 1e14 times
# larger than what one device was apart from itself, those that are zero 4 times at most.
MARGIN = 100.0

TRIES = 2  # a tensor of few elements may come out equal by chance


def max_difference(expected: Tensor, got: Tensor) -> float:
    """The largest difference of two tensors' elements; nan and other shapes count as inf."""
    if expected.shape != got.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    a, b = to_double(expected), to_double(got)
    if torch.equal(a, b):
        return 0.0
    difference = float(torch.where(a == b, 0.0, (a - b).abs()).max())  # infinities of a mask are equal
    return difference if difference == difference else math.inf


def to_double(tensor: Tensor) -> Tensor:
    """In double precision, on the CPU."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def max_magnitude(tensor: Tensor) -> float:
    """Its largest element; infinities are no size."""
    if tensor.numel() == 0:
        return 0.0
    sizes = to_double(tensor).abs()
    return float(torch.where(sizes.isinf(), 0.0, sizes).max())


def rounding_floor(once: Tensor, again: Iterable[Tensor]) -> float:
    """How far a value is from itself, at most; where it is no number there is no telling, which counts as 0."""
    distances = [max_difference(once, other) for other in again]
    return max((distance for distance in distances if distance < math.inf), default=0.0)


def nudge_values(tensors: Iterable[Tensor], seed: int) -> None:
    """Move every number by one unit in the last place, up or down."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (t for t in tensors if t.is_floating_point() or t.is_complex()):
            signs = 2 * torch.randint(0, 2, tensor.shape, generator=random, dtype=torch.float64) - 1
            tensor *= 1 + torch.finfo(tensor.dtype).eps * signs.to(tensor.device)


def nudge_fractions(tensors: Iterable[Tensor], seed: int) -> None:
    """As :func:`nudge_values`, but whole numbers stay as they are: what is given as data may count or mark
    something.
    """
    for tensor in (t for t in tensors if t.is_floating_point()):
        moved = tensor.clone()
        nudge_values([moved], seed)
        tensor.copy_(torch.where(tensor == tensor.round(), tensor, moved))
