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

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polylane.placement.kernels.empty_shards import return_empty
from polylane.placement.placement import Cuts, Shard, divide_cuts, even_cuts, scale_cuts
from polylane.placement.redistribute import Axis
from polylane.placement.strategy import OperatorCall, RankCall, Strategy, TensorValue

# Positions of a dimension as (start, stop); in exchanged pieces (start, length).
Range = tuple[int, int]


class HaloExchange:
    """The ranges of a dimension that each rank wants, from a value that is sharded along it: ``halo(axis, x)``.

    Backward, the gradients of a position that several ranks have are summed at its owner.

    Args:
        dim: index of the sharded dimension.
        cuts: positions at which the dimension is cut between ranks.
        wanted: for every rank, disjoint ranges in ascending order; they may reach beyond the ends.
        value: constant that fills positions beyond the ends.

    Attributes:
        max_sent: largest number of positions that any rank sends to others.
    """

    __module__, __name__ = "polylane", "halo"

    def __init__(self, dim: int, cuts: Cuts, wanted: Sequence[Sequence[Range]], value: float = 0.0) -> None:
        self.shard, self.value = Shard(dim, cuts), value
        self.wanted = [tuple(each) for each in wanted]
        ranks = range(len(self.wanted))
        self.max_sent = max(sum(n for j in ranks if j != i for _, _, n in self.overlaps(i, j)) for i in ranks)

    def __call__(self, axis: Axis, x: Tensor) -> Tensor:
        return _Halo.apply(x, axis, self)  # type: ignore[no-any-return, no-untyped-call]

    def overlaps(self, owner: int, reader: int) -> list[tuple[int, int, int]]:
        """Return what ``owner`` has that ``reader`` wants: (start in owner's part, start in wanted, length)."""
        # ``here`` and ``there`` run through the local positions of the owner's ranges and of the reader's wanted
        # ranges.
        found, there = list[tuple[int, int, int]](), 0
        for start, stop in self.wanted[reader]:
            here = 0
            for a, b in self.shard.ranges(owner):
                first, last = max(a, start), min(b, stop)
                if first < last:
                    found.append((here + first - a, there + first - start, last - first))
                here += b - a
            there += stop - start
        return found

    def wanted_length(self, index: int) -> int:
        """Return the number of positions that rank ``index`` wants."""
        return sum(stop - start for start, stop in self.wanted[index])

    @property
    def is_trivial(self) -> bool:
        """Whether all ranks own exactly what they want, so that no exchange is needed."""
        return all(self.shard.ranges(i) == tuple(r for r in w if r[0] < r[1]) for i, w in enumerate(self.wanted))


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, halo: HaloExchange) -> Tensor:
        ctx.axis, ctx.halo, ctx.shape, dim, me = axis, halo, x.shape, halo.shard.dim, axis.index
        outgoing = [[(at, n) for at, _, n in halo.overlaps(me, i)] for i in range(axis.degree)]
        incoming = [[(at, n) for _, at, n in halo.overlaps(i, me)] for i in range(axis.degree)]
        out = x.new_full((*x.shape[:dim], halo.wanted_length(me), *x.shape[dim + 1 :]), halo.value)
        for at, part in _exchange_pieces(axis, x, dim, outgoing, incoming, halo):
            out.narrow(dim, at, part.shape[dim]).copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, halo, dim, me = ctx.axis, ctx.halo, ctx.halo.shard.dim, ctx.axis.index
        # The transpose of forward: what was received is sent back, and what was sent comes back as gradients to add.
        outgoing = [[(at, n) for _, at, n in halo.overlaps(i, me)] for i in range(axis.degree)]
        incoming = [[(at, n) for at, _, n in halo.overlaps(me, i)] for i in range(axis.degree)]
        out = grads[0].new_zeros(ctx.shape)
        for at, part in _exchange_pieces(axis, grads[0], dim, outgoing, incoming, halo):
            out.narrow(dim, at, part.shape[dim]).add_(part)
        return out, None, None


def _exchange_pieces(
    axis: Axis, x: Tensor, dim: int, outgoing: list[list[Range]], incoming: list[list[Range]], halo: HaloExchange
) -> Iterator[tuple[int, Tensor]]:
    """Exchange pieces of ``x``, given as (start, length) per rank; yield (start in the result, piece) of what comes."""
    me = axis.index
    pieces: list[Tensor | None] = [
        x if i == me else _select_ranges(x, dim, each) if each else None for i, each in enumerate(outgoing)
    ]
    shapes = [
        (*x.shape[:dim], sum(n for _, n in each), *x.shape[dim + 1 :]) if each and i != me else None
        for i, each in enumerate(incoming)
    ]
    # Ranks know each other's wants: if no rank wants anything of another, all of them skip the exchange.
    received = axis.exchange(pieces, shapes) if halo.max_sent else pieces
    for i, each in enumerate(incoming):
        # This rank's own piece did not travel: ``pieces[me]`` is x itself, which only gives the dtype.
        part = _select_ranges(x, dim, outgoing[me]) if i == me and each else received[i]
        taken = 0
        for at, n in each:
            assert part is not None
            yield at, part.narrow(dim, taken, n)
            taken += n


def _select_ranges(x: Tensor, dim: int, stretches: Sequence[Range]) -> Tensor:
    parts = [x.narrow(dim, at, n) for at, n in stretches]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


# ---- what is done with it --------------------------------------------------------------------------------------------


class TrimRange:
    """A range of a dimension: ``trim(x)``; an input that has the range's length already stays unchanged.

    Args:
        dim: index of the trimmed dimension.
        start: first position of the range.
        length: number of positions in the range.
    """

    __module__, __name__ = "polylane", "trim"

    def __init__(self, dim: int, start: int, length: int) -> None:
        self.dim, self.start, self.length = dim, start, length

    def __call__(self, x: Tensor) -> Tensor:
        return x if x.shape[self.dim] == self.length else x.narrow(self.dim, self.start, self.length)


class PickPositions:
    """Positions along a dimension, in any order and with repetitions: ``pick(x)``.

    Args:
        dim: index of the dimension to pick from.
        positions: indices within the local part.
    """

    __module__, __name__ = "polylane", "pick"

    def __init__(self, dim: int, positions: Sequence[int]) -> None:
        self.dim, self.positions = dim, tuple(positions)

    def __call__(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, _index_tensor(self.positions, x.device))


class WeightPositions:
    """A value times a factor for every position along a dimension: ``weighted(x)``.

    Args:
        dim: index of the weighted dimension.
        weights: one factor for each position of the local part.
    """

    __module__, __name__ = "polylane", "weighted"

    def __init__(self, dim: int, weights: Sequence[float]) -> None:
        self.dim, self.weights = dim, tuple(weights)

    def __call__(self, x: Tensor) -> Tensor:
        shape = [-1 if d == self.dim else 1 for d in range(x.dim())]
        weights = x.new_tensor(self.weights, dtype=torch.promote_types(x.dtype, torch.float32))
        return (x * weights.view(shape)).to(x.dtype)


@lru_cache(maxsize=256)
def _index_tensor(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.long, device=device)


# ---- strategies ------------------------------------------------------------------------------------------------------


def contiguous_ranges(positions: Sequence[int]) -> list[Range]:
    """Return the disjoint ranges that hold these positions, in ascending order."""
    found = list[Range]()
    for p in sorted(set(positions)):
        if found and found[-1][1] == p:
            found[-1] = (found[-1][0], p + 1)
        else:
            found.append((p, p + 1))
    return found


def matching_cuts(
    call: OperatorCall, x: tuple[TensorValue, int], out: tuple[TensorValue, int]
) -> Iterator[tuple[Cuts, Cuts]]:
    """Yield cuts of a dimension of positions before and after an operator, as (input cuts, output cuts).

    Even cuts go with even ones; cuts that neighbours ask for are scaled by the ratio of the sizes.

    Args:
        call: the operator on the whole tensors.
        x, out: a tensor and the index of its dimension, on the input and on the output side.
    """
    (source, i), (target, o) = x, out
    n, m, degree = source.shape[i], target.shape[o], call.degree
    if n < 2 or m < 2:
        return
    found = {(even_cuts(n, degree), even_cuts(m, degree)): None}
    for cuts in call.common_cuts(source.at(i)):
        found[cuts, _scale_cuts(cuts, n, m, degree)] = None
    for cuts in call.common_cuts(target.at(o)):
        # A rank's outputs must be one range for the halo: outputs in several segments are not offered.
        if len(cuts) == 1:
            found[_scale_cuts(cuts, m, n, degree), cuts] = None
    yield from found


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
    dims: tuple[int, int],
    needs: Callable[[int, int], Sequence[Range]],
    local: Callable[[RankCall, int, int], None],
    *,
    value: float = 0.0,
) -> Iterator[Strategy]:
    """Yield the strategies that shard a dimension of positions; every rank first gets what its outputs read.

    Args:
        call: an operator with one output.
        name: the strategies' name for users.
        argument: name of the input that is sharded.
        dims: index of the sharded dimension in the input, and in the output.
        needs: returns the input ranges that the outputs from start to stop (not empty) read; ascending, disjoint.
        local: changes the call of a rank with outputs from start to stop; it finds the wanted ranges, joined one after
            the other, as ``edit[argument]``.
        value: constant that fills positions beyond the ends.
    """
    x, out = call[argument], call.outputs[0]
    for source, target in matching_cuts(call, (x, dims[0]), (out, dims[1])):
        yield _position_strategy(
            call, name, argument, (Shard(dims[0], source), Shard(dims[1], target)), needs, local, value
        )


def _position_strategy(
    call: OperatorCall,
    name: str,
    argument: str,
    placed: tuple[Shard, Shard],
    needs: Callable[[int, int], Sequence[Range]],
    local: Callable[[RankCall, int, int], None],
    value: float,
) -> Strategy:
    x, (source, target) = call[argument], placed
    ends = [(target.cuts[0][i], target.cuts[0][i + 1]) for i in range(call.degree)]
    halo = HaloExchange(source.dim, source.cuts, [needs(a, b) if a < b else () for a, b in ends], value)

    def change(edit: RankCall) -> None:
        # All ranks take part in the exchange, also those without outputs: their positions may be wanted by others.
        if not halo.is_trivial:
            edit[argument] = edit.insert(halo, edit.axis, edit[argument])
        start, stop = ends[edit.index]
        if start < stop:
            local(edit, start, stop)
        else:
            return_empty(edit)

    rows = halo.max_sent
    # One exchange forward, and one backward if the input has a gradient.
    elements = torch.Size(x.shape).numel() // max(source.size, 1) * rows
    ways = (1 + x.gradient) if rows else 0
    return call.strategy(
        name, {x.index: source}, target, local=change, work=target.largest_share,
        sent=elements * x.dtype.itemsize * ways, messages=ways,
    )  # fmt: skip
