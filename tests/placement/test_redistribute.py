"""Moves: a value arrives as it is to lie, and its gradient goes back as the value lay, from and to any placement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from polylane.placement.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Partial,
    Placement,
    Shard,
    even_cuts,
    gradient_placement,
    join_cuts,
)
from polylane.placement.redistribute import Axis, Redistribute, local_shard
from tests.placement.split_checks import on_threads, uneven

SHAPE = (7, 6)


def placements(degree: int) -> list[Placement]:
    rows, columns = SHAPE
    segments = join_cuts([even_cuts(2, degree), even_cuts(4, degree)])
    shards = [Shard(0, even_cuts(rows, degree)), Shard(0, uneven(rows, degree)), Shard(1, even_cuts(columns, degree))]
    return [REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL, *shards, Shard(1, segments)]


def parts(whole: Tensor, placement: Placement, degree: int) -> list[Tensor]:
    """What each rank has of a value that lies so."""
    if isinstance(placement, Partial):
        summands = list(torch.randn(degree - 1, *SHAPE, generator=torch.Generator().manual_seed(2)).double())
        return [*summands, whole - sum(summands)]
    if isinstance(placement, Shard):
        return [local_shard(whole, placement, i) for i in range(degree)]
    return [whole.clone() for _ in range(degree)]


def assert_lies(found: Sequence[Tensor], whole: Tensor, placement: Placement) -> None:
    if isinstance(placement, Partial):
        torch.testing.assert_close(torch.stack(list(found)).sum(0), whole)
        return
    for own, expected in zip(found, parts(whole, placement, len(found)), strict=True):
        torch.testing.assert_close(own, expected)


def both_ways(move: Redistribute, values: list[Tensor], slopes: list[Tensor], axis: Axis) -> tuple[Tensor, Tensor]:
    """What a rank gets of a value, and of its gradient."""
    x = values[axis.index].requires_grad_()
    out = move(axis, x)
    (back,) = torch.autograd.grad(out, x, slopes[axis.index])
    return out.detach(), back


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_every_placement_becomes_every_other(degree: int) -> None:
    random = torch.Generator().manual_seed(1)
    value, slope = (torch.randn(SHAPE, generator=random, dtype=torch.float64) for _ in "vg")
    for source, target in product(placements(degree), placements(degree)):
        values, slopes = parts(value, source, degree), parts(slope, gradient_placement(target), degree)
        found = on_threads(degree, partial(both_ways, Redistribute(source, target), values, slopes))
        assert_lies([out for out, _ in found], value, target)
        assert_lies([back for _, back in found], slope, gradient_placement(source))
