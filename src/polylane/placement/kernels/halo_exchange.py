"""Halo exchange: what a rank's outputs read beyond its own part of a dimension comes from the ranks that have it.

Dryden et al., Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism, 2019, section III.

A convolution with kernel 3, stride 1 and padding 1 over 9 positions on 3 ranks, as ranges [start, stop):

    rank   owns     writes   wanted (reads)   from before      from after       beyond the ends
    0      [0, 3)   [0, 3)   [-1, 4)          -                [3, 4) of 1      [-1, 0)
    1      [3, 6)   [3, 6)   [2, 7)           [2, 3) of 0      [6, 7) of 2      -
    2      [6, 9)   [6, 9)   [5, 10)          [5, 6) of 1      -                [9, 10)

Forward, "from before" and "from after" are received and put next to the rank's own positions; positions beyond the ends
are filled with a constant. Backward, the same ranges travel the other way: gradients of received positions return to
their owners, which add them to their own. With larger kernels or strides a range may come from several ranks, or not
touch the rank's own part at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polylane.placement.kernels.empty_shards import return_empty
from polylane.placement.placement import Cuts, Shard, divide_cuts, even_cuts, scale_cuts
from polylane.placement.redistribute import Axis, Range, begin_exchange_ranges, overlapping_ranges
from polylane.placement.strategy import OperatorCall, RankCall, Strategy


class HaloExchange:
    """The ranges of a dimension that each rank wants, from a value that is sharded along it: ``halo(axis, x)``.

    Backward, the gradients of a position that several ranks have are summed at its owner.

    Args:
        dim: index of the sharded dimension.
        cuts: positions at which the dimension is cut between ranks.
        wanted_ranges: for every rank, disjoint ranges in ascending order; they may reach beyond the ends.
        value: constant that fills positions beyond the ends.

    Attributes:
        max_sent: largest number of positions that any rank sends to others.
    """

    __module__, __name__ = "polylane", "halo"

    def __init__(self, dim: int, cuts: Cuts, wanted_ranges: Sequence[Sequence[Range]], value: float = 0.0) -> None:
        self.shard, self.value = Shard(dim, cuts), value
        self.wanted = [tuple(ranges) for ranges in wanted_ranges]
        ranks = range(len(self.wanted))
        self.owned = self.shard.ranges_by_rank
        self.max_sent = max(
            sum(n for j in ranks if j != i for _, _, n in overlapping_ranges(self.owned[i], self.wanted[j]))
            for i in ranks
        )

    def __call__(self, axis: Axis, x: Tensor) -> Tensor:
        return _Halo.apply(x, axis, self)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def is_trivial(self) -> bool:
        """Whether all ranks own exactly what they want, so that no exchange is needed."""
        return all(part == tuple(r for r in w if r[0] < r[1]) for part, w in zip(self.owned, self.wanted, strict=True))


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, halo: HaloExchange) -> Tensor:
        ctx.axis, ctx.halo, ctx.shape, dim = axis, halo, x.shape, halo.shard.dim
        length = sum(stop - start for start, stop in halo.wanted[axis.index])
        out = x.new_full((*x.shape[:dim], length, *x.shape[dim + 1 :]), halo.value)
        for at, part in begin_exchange_ranges(axis, x, dim, halo.owned, halo.wanted)():
            out.narrow(dim, at, part.shape[dim]).copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, halo, dim = ctx.axis, ctx.halo, ctx.halo.shard.dim
        # The transpose of forward: what was received is sent back, and what was sent comes back as gradients to add.
        out = grads[0].new_zeros(ctx.shape)
        for at, part in begin_exchange_ranges(axis, grads[0], dim, halo.wanted, halo.owned)():
            out.narrow(dim, at, part.shape[dim]).add_(part)
        return out, None, None


# ---- what is done with it --------------------------------------------------------------------------------------------


def trim(dim: int, start: int, length: int, x: Tensor) -> Tensor:
    """Return a range of a dimension; an input that has the range's length already stays unchanged."""
    return x if x.shape[dim] == length else x.narrow(dim, start, length)


def pick(dim: int, positions: tuple[int, ...], x: Tensor) -> Tensor:
    """Return positions of the local part along a dimension, in any order and with repetitions."""
    return x.index_select(dim, _index_tensor(positions, x.device))


def weighted(dim: int, weights: Sequence[float], x: Tensor) -> Tensor:
    """Return a value times one factor for each position of the local part along a dimension."""
    factors = x.new_tensor(weights, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * factors.view([-1 if d == dim else 1 for d in range(x.dim())])).to(x.dtype)


@lru_cache(maxsize=256)
def _index_tensor(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.long, device=device)


# ---- strategies ------------------------------------------------------------------------------------------------------


# Any pair of cuts is correct, because halos fetch what is missing; proportional ones send least.
def _scale_cuts(cuts: Cuts, size: int, other: int, degree: int) -> Cuts:
    if len(cuts) > 1 or cuts == even_cuts(size, degree):
        return even_cuts(other, degree)
    if other % size == 0:
        return scale_cuts(cuts, other // size)
    reduced = divide_cuts(cuts, size // other) if size % other == 0 else None
    return reduced or even_cuts(other, degree)


def strategies_by_position(
    call: OperatorCall,
    name: str,
    argument: str,
    dim: int,
    needs: Callable[[int, int], Sequence[Range]],
    local: Callable[[RankCall, int, int], None],
    *,
    value: float = 0.0,
) -> Iterator[Strategy]:
    """Yield the strategies that shard a dimension of positions; every rank first gets what its outputs read.

    Even cuts of the input go with even ones of the output; cuts that neighbours ask for are scaled by the ratio of the
    sizes.

    Args:
        call: an operator with one output.
        name: the strategies' name for users.
        argument: name of the input that is sharded.
        dim: index of the sharded dimension, in the input and in the output.
        needs: returns the input ranges that the outputs from start to stop (not empty) read; ascending, disjoint.
        local: changes the call of a rank with outputs from start to stop; it finds the wanted ranges, joined one after
            the other, as ``edit[argument]``.
        value: constant that fills positions beyond the ends.
    """
    x, out, degree = call[argument], call.outputs[0], call.degree
    n, m = x.shape[dim], out.shape[dim]
    if n < 2 or m < 2:
        return

    def back(cuts: Cuts) -> Cuts | None:
        # A rank's outputs must be one range for the halo: outputs in several segments are not offered.
        return _scale_cuts(cuts, m, n, degree) if len(cuts) == 1 else None

    onward = partial(_scale_cuts, size=n, other=m, degree=degree)
    for source, target in call.matching_cuts(x.at(dim), out.at(dim), onward, back):
        (ends,) = target
        outputs = list(pairwise(ends))
        halo = HaloExchange(dim, source, [needs(a, b) if a < b else () for a, b in outputs], value)
        # One exchange forward, and one backward if the input has a gradient.
        exchanges = (1 + x.gradient) if halo.max_sent else 0
        yield call.strategy(
            name, {x.index: Shard(dim, source)}, Shard(dim, target),
            local=partial(_compute_positions, argument, halo, outputs, local),
            work=Shard(dim, target).largest_share,
            sent=math.prod(x.shape) // n * halo.max_sent * x.dtype.itemsize * exchanges, messages=exchanges,
        )  # fmt: skip


def _compute_positions(
    argument: str,
    halo: HaloExchange,
    outputs: Sequence[Range],
    local: Callable[[RankCall, int, int], None],
    edit: RankCall,
) -> None:
    """Make a rank's call compute its outputs from start to stop, after the exchange of what they read."""
    # All ranks take part in the exchange, also those without outputs: their positions may be wanted by others.
    if not halo.is_trivial:
        edit[argument] = edit.insert(halo, edit.axis, edit[argument])
    start, stop = outputs[edit.index]
    if start < stop:
        local(edit, start, stop)
    else:
        return_empty(edit)
