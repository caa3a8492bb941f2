"""Gradients that are zero up to rounding: how they are known, and what a plan's optimizer is given in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.proof.relative import FLOOR

# A key's bias before softmax and a bias before BatchNorm change no loss: their gradients are zero, and what is computed
# is the rounding of sums, another number in every order of summation. An optimizer that divides by a gradient's size
# (Adam; Kingma and Ba, 2015) makes whole steps of it, so that two exact runs drift apart.

# How much further two orders of summation may be apart than one device is from itself, at weights that differ by one
# unit in the last place. On transformers, convolutions and LSTMs it was 6 times at most; gradients that are not zero
# were more than 1e14 times larger than what one device was apart from itself, those that are zero 4 times at most.
MARGIN = 1e3

TRIES = 2  # a tensor of few elements may come out equal by chance


@dataclass(frozen=True)
class Rounding:
    """The reference's gradient of one parameter in one step, some of whose elements are zero up to rounding.

    Attributes:
        gradient: whole, as the reference's optimizer took it.
        bound: what is no larger is zero up to rounding.
    """

    gradient: Tensor
    bound: float


def zero_up_to_rounding(
    gradients: Mapping[str, Tensor], again: Callable[[int], Mapping[str, Tensor]], tolerance: float
) -> dict[str, Rounding]:
    """The gradients of a step that are zero up to rounding, in whole or in part, on one device.

    Such an element is no larger than ``MARGIN`` times what the device is apart from itself on its tensor; and so small
    that the proof takes any two gradients of that size for equal.

    Args:
        gradients: of the reference.
        again: computes the same once more, from weights that were nudged (:func:`nudge`); takes the number of the try.
        tolerance: of the proof.
    """
    sizes = {name: float(g.abs().max()) for name, g in gradients.items() if g.numel()}
    floor = FLOOR * max(sizes.values(), default=0.0)
    equal = {name: tolerance / 2 * max(size, floor) for name, size in sizes.items()}
    apart = {name: 0.0 for name in sizes if _smallest(gradients[name]) <= equal[name]}
    for attempt in range(TRIES):
        still = [name for name in apart if not apart[name]]
        if not still:
            break
        other = again(attempt)
        for name in still:
            apart[name] = float((gradients[name] - other.get(name, gradients[name])).abs().max())
    bounds = {name: min(MARGIN * apart[name], equal[name]) for name in apart if apart[name]}
    return {
        name: Rounding(gradients[name].clone(), bound)
        for name, bound in bounds.items()
        if _smallest(gradients[name]) <= bound
    }


def _smallest(gradient: Tensor) -> float:
    """The smallest size of an element that is not zero: zeros are what a unit that is off has on every device."""
    sizes = gradient[gradient != 0].abs()
    return float(sizes.min()) if sizes.numel() else 0.0


def nudge(parameters: Iterable[Tensor], seed: int) -> None:
    """Move every weight by one unit in the last place, up or down."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in parameters if p.is_floating_point() or p.is_complex()):
            signs = 2 * torch.randint(0, 2, parameter.shape, generator=random, dtype=torch.float64) - 1
            parameter *= 1 + torch.finfo(parameter.dtype).eps * signs


@contextmanager
def give(rounding: Mapping[str, Rounding], gradients: Mapping[str, Tensor | None]) -> Iterator[set[str]]:
    """For a while, put the reference's gradients in place of a plan's where both are zero up to rounding.

    Args:
        rounding: of this step, in the shape that this worker holds.
        gradients: the plan's; each comes back at the end.

    Yields:
        The names of those that were changed.
    """
    changed: dict[str, tuple[Tensor, Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient is None or name not in rounding:
            continue
        reference, bound = rounding[name].gradient.to(gradient.device), rounding[name].bound
        both = (reference.abs() <= bound) & (gradient.abs() <= bound)
        given = torch.where(both, reference, gradient)
        if not torch.equal(given, gradient):
            changed[name] = gradient, gradient.clone()
            gradient.copy_(given)
    try:
        yield set(changed)
    finally:
        for gradient, own in changed.values():
            gradient.copy_(own)
