"""Rounding noise: how far a value changes when its inputs change by one unit in the last place.

The backward error of a sum is as if its terms were that far off (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, chapter 3). Differences of that size are rounding and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from polylane.graph.sparse_gradients import densify

# Limit on the difference between two devices' results, in units of one device's own rounding noise in a few tries.
# Measured on transformers, convolutions and LSTMs: at most 6 times. Gradients that are not zero were more than 1e14
# times the noise, those that are zero in exact arithmetic 4 times at most.
MARGIN = 100.0

# As MARGIN, of numbers in half precision: one unit in the last place moves a gradient by a hundredth of its size there,
# and MARGIN times that excuses all.
COARSE_MARGIN = 10.0

TRIES = 2  # a tensor of few elements may come out equal by chance


def max_difference(expected: Tensor, got: Tensor) -> float:
    """Return the largest difference of two tensors' elements; nan and different shapes count as inf."""
    if expected.shape != got.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    a, b = to_double(expected), to_double(got)
    if torch.equal(a, b):
        return 0.0
    difference = float(torch.where(a == b, 0.0, (a - b).abs()).max())  # equal infinities (masks) have no difference
    # nan differs from itself.
    return difference if difference == difference else math.inf


def to_double(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, on the CPU; a sparse one as an ordinary tensor."""
    return densify(tensor).detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def max_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value; infinities are left out."""
    if tensor.numel() == 0:
        return 0.0
    sizes = to_double(tensor).abs()
    return float(torch.where(sizes.isinf(), 0.0, sizes).max())


def rounding_floor(once: Tensor, repetitions: Iterable[Tensor]) -> float:
    """Return the largest distance of a value from its repetitions; distances that are not finite are left out."""
    distances = [max_difference(once, repetition) for repetition in repetitions]
    return max((distance for distance in distances if distance < math.inf), default=0.0)


def nudge_values(tensors: Iterable[Tensor], seed: int, dtype: torch.dtype | None = None) -> None:
    """Change every number by one unit in the last place, up or down, in place.

    Args:
        tensors: the tensors; those of integers stay.
        seed: decides which numbers move up, and which down.
        dtype: the type that a computation rounds them to, whose units count; None: each tensor's own.
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (t for t in tensors if t.is_floating_point() or t.is_complex()):
            signs = 2 * torch.randint(0, 2, tensor.shape, generator=random, dtype=torch.float64) - 1
            tensor *= 1 + torch.finfo(dtype or tensor.dtype).eps * signs.to(tensor.device)


def nudge_fractions(tensors: Iterable[Tensor], seed: int) -> None:
    """As :func:`nudge_values`, but whole numbers are unchanged: in data they may be counts or labels."""
    for tensor in (t for t in tensors if t.is_floating_point()):
        moved = tensor.clone()
        nudge_values([moved], seed)
        tensor.copy_(torch.where(tensor == tensor.round(), tensor, moved))
