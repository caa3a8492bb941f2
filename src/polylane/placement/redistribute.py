"""Redistribution: a value from one placement to another, by one collective forward and its dual backward.

from / to       Replicate         Shard             Partial
Replicate       -                 local slice       rank 0 keeps it, zeros elsewhere
Shard           all-gather        all-to-all        padded with zeros
Partial         all-reduce        reduce-scatter    -

The gradient goes from the dual of the target to the dual of the source (:func:`gradient_placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from polylane.placement.placement import PARTIAL, Partial, Placement, Replicate, Shard, gradient_placement, with_offsets

# Positions of a dimension as (start, stop); in exchanged pieces (start, length).
Range = tuple[int, int]


class Axis(Protocol):
    """The ranks along one axis of a mesh, as one of them sees them.

    All ranks of an axis call the same methods in the same order, as for any collective.

    Attributes:
        index: this rank's position on the axis, from 0.
        degree: number of ranks along the axis.
    """

    index: int
    degree: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise equal everywhere; ``tensor`` is not changed."""
        ...

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks; ``tensor`` may be overwritten."""
        ...

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """Send ``pieces[i]`` to rank i and return what each rank sent to this one (all-to-all with unequal sizes).

        Args:
            pieces: contiguous tensors of one dtype, one per rank; None where rank i gets nothing. This rank's own comes
                back unchanged and must be present: it gives the dtype.
            shapes: shape of the piece from each rank, None where none comes.
        """
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`all_reduce`; calling the result waits for it and returns its value."""
        ...

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        """Start :meth:`exchange`; calling the result waits for it and returns its value."""
        ...


def collective_name(source: Placement, target: Placement) -> str:
    """Return the collective that takes a value from one placement to another (forward), or "" if none is needed."""
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter" if isinstance(target, Shard) else ""
    if isinstance(source, Shard):
        if isinstance(target, Replicate):
            return "all_gather"
        return "all_to_all" if isinstance(target, Shard) and target != source else ""
    return ""


def gradient_ends(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """Return the placements between which the gradient of a redistributed value is redistributed."""
    return gradient_placement(target), gradient_placement(source)


class Redistribute:
    """A redistribution along an axis, as an operator of a rank's graph: ``move(axis, x)``."""

    __module__ = "polylane"

    def __init__(self, source: Placement, target: Placement) -> None:
        self.source, self.target = source, target
        self.__name__ = collective_name(source, target) or "place"

    def __call__(self, axis: Axis, x: Tensor) -> Tensor:
        if self.source == self.target:
            return x
        return _RedistributeFunction.apply(x, axis, self.source, self.target)  # type: ignore[no-any-return, no-untyped-call]


class _RedistributeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: Placement, target: Placement) -> Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        out = redistribute(axis, x, source, target)
        # Autograd forbids to return an input as it is, and of a view that its memory is written, as the user's own
        # Python may write a weight: an alias is neither.
        return x.detach() if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return redistribute(ctx.axis, grads[0], *gradient_ends(ctx.source, ctx.target)), None, None, None


def redistribute(axis: Axis, x: Tensor, source: Placement, target: Placement) -> Tensor:
    """Return a value in another placement; not differentiable, see :class:`Redistribute`."""
    return begin_redistribute(axis, x, source, target)()


def begin_redistribute(axis: Axis, x: Tensor, source: Placement, target: Placement) -> Callable[[], Tensor]:
    """Start :func:`redistribute`; calling the result waits for the collective and returns the value."""
    if isinstance(source, Replicate):
        if isinstance(target, Partial):  # exactly one rank may keep a partial sum that is not zero
            return _finished(x if axis.index == 0 else torch.zeros_like(x))
        return _finished(local_shard(x, target, axis.index) if isinstance(target, Shard) else x)
    if isinstance(source, Partial):
        if isinstance(target, Partial):
            return _finished(x)
        if isinstance(target, Replicate):
            return axis.begin_all_reduce(x.contiguous())
        return _reduce_scatter(axis, x, target)
    if isinstance(target, Shard):
        return _finished(x) if target == source else _all_to_all(axis, x, source, target)
    if isinstance(target, Partial):
        return _finished(pad_shard(x, source, axis.index))
    return _all_gather(axis, x, source)


def _finished(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def local_shard(x: Tensor, shard: Shard, index: int) -> Tensor:
    """Return rank ``index``'s part of a whole value; contiguous, in its own memory."""
    # A view would keep the whole tensor alive as long as its part.
    parts = [x.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges(index)]
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(parts, shard.dim) if parts else x.narrow(shard.dim, 0, 0).clone()


def pad_shard(x: Tensor, shard: Shard, index: int) -> Tensor:
    """Return rank ``index``'s part of a value in the whole value's shape, zero elsewhere."""
    out = x.new_zeros(_shape_with_length(x.shape, shard.dim, shard.size))
    _fill_shard(out, x, shard, index)
    return out


def _fill_shard(out: Tensor, part: Tensor, shard: Shard, index: int) -> None:
    for start, stop, at in with_offsets(shard.ranges(index)):
        out.narrow(shard.dim, start, stop - start).copy_(part.narrow(shard.dim, at, stop - start))


def _shape_with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return tuple(length if d == dim else n for d, n in enumerate(shape))


def _all_gather(axis: Axis, x: Tensor, source: Shard) -> Callable[[], Tensor]:
    local_part = x.contiguous()
    shapes = [_shape_with_length(x.shape, source.dim, source.local_length(i)) for i in range(axis.degree)]
    exchange = axis.begin_exchange([local_part] * axis.degree, shapes)

    def finish() -> Tensor:
        parts = exchange()
        # One segment: the parts in the order of ranks are the whole; otherwise ranks interleave.
        if len(source.cuts) == 1:
            return torch.cat([part for part in parts if part is not None], source.dim)
        return assemble_shards(parts, source)

    return finish


def assemble_shards(parts: Sequence[Tensor | None], shard: Shard) -> Tensor:
    """Return a whole value from the parts of all ranks, in their order."""
    first_part = parts[0]
    assert first_part is not None
    out = first_part.new_empty(_shape_with_length(first_part.shape, shard.dim, shard.size))
    for i, part in enumerate(parts):
        assert part is not None
        _fill_shard(out, part, shard, i)
    return out


# Reduce-scatter as an all-to-all and local sums: parts may have unequal lengths, and the order of the sum is fixed.
def _reduce_scatter(axis: Axis, x: Tensor, target: Shard) -> Callable[[], Tensor]:
    pieces = [local_shard(x, target, i) for i in range(axis.degree)]
    shape = tuple(pieces[axis.index].shape)
    exchange = axis.begin_exchange(pieces, [shape] * axis.degree)

    def finish() -> Tensor:
        out, *parts = exchange()
        assert out is not None
        for part in parts:  # in the order of ranks, so that the result does not depend on which rank sums
            assert part is not None
            out = out + part
        return out

    return finish


# Two dimensions: cut the local part along the target, and join what comes along the source.
def _all_to_all(axis: Axis, x: Tensor, source: Shard, target: Shard) -> Callable[[], Tensor]:
    if source.dim == target.dim:
        return _recut_dimension(axis, x, source, target)
    pieces = [local_shard(x, target, i) for i in range(axis.degree)]
    length = target.local_length(axis.index)
    shapes = [
        _shape_with_length(_shape_with_length(x.shape, target.dim, length), source.dim, source.local_length(i))
        for i in range(axis.degree)
    ]
    exchange = axis.begin_exchange(pieces, shapes)
    return lambda: assemble_shards(exchange(), source)


def _recut_dimension(axis: Axis, x: Tensor, source: Shard, target: Shard) -> Callable[[], Tensor]:
    """Shard the same dimension at other positions: every rank sends the overlap of its part with the target's parts."""
    dim = source.dim
    exchange = begin_exchange_ranges(axis, x, dim, source.ranges_by_rank, target.ranges_by_rank)

    def finish() -> Tensor:
        out = x.new_empty(_shape_with_length(x.shape, dim, target.local_length(axis.index)))
        for at, part in exchange():
            out.narrow(dim, at, part.shape[dim]).copy_(part)
        return out

    return finish


# ---- ranges of one dimension, from the ranks that own them to those that want them -----------------------------------


def overlapping_ranges(owned: Sequence[Range], wanted_ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return what an owner has that a reader wants: (start in the owner's part, start in what is wanted, length)."""
    return [
        (owned_offset + low - a, wanted_offset + low - start, high - low)
        for start, stop, wanted_offset in with_offsets(wanted_ranges)
        for a, b, owned_offset in with_offsets(owned)
        if (low := max(a, start)) < (high := min(b, stop))
    ]


def begin_exchange_ranges(
    axis: Axis, x: Tensor, dim: int, owned: Sequence[Sequence[Range]], wanted_ranges: Sequence[Sequence[Range]]
) -> Callable[[], Iterator[tuple[int, Tensor]]]:
    """Start to send every rank what it wants of a dimension, from the ranks that have it.

    Args:
        axis: the ranks that exchange with each other.
        x: this rank's part: the ranges that it owns, one after the other.
        dim: index of the dimension.
        owned, wanted_ranges: disjoint ranges of the whole dimension, ascending, by rank.

    Returns:
        A function that waits, and yields (start in what this rank wants, piece) of all that it gets.
    """
    me = axis.index
    # Pieces as (start, length), in the part of the rank that sends them and in that of the rank that gets them.
    outgoing = [[(at, n) for at, _, n in overlapping_ranges(owned[me], ranges)] for ranges in wanted_ranges]
    incoming = [[(at, n) for _, at, n in overlapping_ranges(ranges, wanted_ranges[me])] for ranges in owned]
    # A rank's own piece does not travel: x itself takes its place, which gives the dtype.
    pieces = [x if i == me else _select_ranges(x, dim, spans) if spans else None for i, spans in enumerate(outgoing)]
    shapes = [
        _shape_with_length(x.shape, dim, sum(n for _, n in spans)) if spans and i != me else None
        for i, spans in enumerate(incoming)
    ]
    exchange = axis.begin_exchange(pieces, shapes)

    def finish() -> Iterator[tuple[int, Tensor]]:
        received = exchange()
        for i, spans in enumerate(incoming):
            part = _select_ranges(x, dim, outgoing[me]) if i == me and spans else received[i]
            offset = 0
            for at, n in spans:
                assert part is not None
                yield at, part.narrow(dim, offset, n)
                offset += n

    return finish


def _select_ranges(x: Tensor, dim: int, pieces: Sequence[Range]) -> Tensor:
    parts = [x.narrow(dim, at, n) for at, n in pieces]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def all_reduce_differentiable(axis: Axis, x: Tensor) -> Tensor:
    """Return the sum over all ranks; differentiable: every rank's gradient is that of the sum."""
    return _RedistributeFunction.apply(x, axis, PARTIAL, Replicate())  # type: ignore[no-any-return, no-untyped-call]
