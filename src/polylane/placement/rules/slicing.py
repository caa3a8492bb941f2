"""Sharding rules of operators that cut along a dimension or join: split, cat, slice, select and their like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise, product

import torch

from polylane.graph.traced_sizes import traced_max, traced_min
from polylane.placement.placement import (
    PARTIAL,
    Cuts,
    Shard,
    even_cuts,
    join_cuts,
    simplify_cuts,
    slice_cuts,
    with_offsets,
)
from polylane.placement.rules.by_dimension import label_dimensions, no_labels, partial_sums, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue

aten = torch.ops.aten

# Combinations of the pieces' cuts that are offered for one dimension.
MOST_COMBINATIONS = 16

# ---- one dimension of several pieces ---------------------------------------------------------------------------------


def cuts_of_pieces(
    call: OperatorCall, full_value: TensorValue, pieces: Sequence[TensorValue], dim: int
) -> Iterator[tuple[Cuts, list[Cuts]]]:
    """Yield cuts of a dimension and of the pieces that it consists of: every rank has its share of every piece.

    First each piece cut evenly, then as the neighbours of the pieces ask, equally for pieces of one size (keys and
    values), then as the neighbours of the whole dimension ask.

    Args:
        call: the operator whose neighbours are looked up.
        full_value: the tensor that consists of all pieces.
        pieces: the tensors that it consists of, in order.
        dim: the dimension along which the pieces follow each other.
    """
    sizes = [piece.shape[dim] for piece in pieces]
    if sum(sizes) < 2:
        return
    places_by_size: dict[int, list[Place]] = {}
    for piece in pieces:
        places_by_size.setdefault(piece.shape[dim], []).append(piece.at(dim))
    options = {n: call.common_cuts(*places) or [even_cuts(n, call.degree)] for n, places in places_by_size.items()}
    # First the n-th way of every size together, then all combinations, up to the limit.
    count = max(len(choices) for choices in options.values())
    combinations = (tuple(choices[min(i, len(choices) - 1)] for choices in options.values()) for i in range(count))
    offered_cuts: dict[tuple[Cuts, tuple[Cuts, ...]], None] = {}
    for choice in islice(chain(combinations, product(*options.values())), MOST_COMBINATIONS):
        chosen = dict(zip(options, choice, strict=True))
        piece_cuts = tuple(chosen[n] for n in sizes)
        offered_cuts[simplify_cuts(join_cuts(piece_cuts)), piece_cuts] = None
    for cuts in call.common_cuts(full_value.at(dim)):
        piece_cuts = tuple(map(simplify_cuts, _clip_cuts(cuts, sizes)))
        if _is_balanced(cuts, piece_cuts, sizes):
            offered_cuts[cuts, piece_cuts] = None
    for cuts, piece_cuts in offered_cuts:
        yield cuts, list(piece_cuts)


def _clip_cuts(cuts: Cuts, sizes: Sequence[int]) -> list[Cuts]:
    return [slice_cuts(cuts, a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def _is_balanced(cuts: Cuts, piece_cuts: Sequence[Cuts], sizes: Sequence[int]) -> bool:
    """Return whether every rank has a part of each piece, unless the segments are the pieces and so were asked for."""
    edges = {p for segment in cuts for p in (segment[0], segment[-1])}
    if edges.issuperset(accumulate(sizes)):
        return True
    ranks = len(cuts[0]) - 1
    return all(n <= ranks or all(Shard(0, piece).ranges_by_rank) for piece, n in zip(piece_cuts, sizes, strict=True))


def _split_dim(call: OperatorCall) -> int:
    x: TensorValue = call["self"]
    named = {"hsplit": min(1, x.dim - 1), "vsplit": 0, "dsplit": 2}
    return named[call.base] if call.base in named else int(call["dim"]) % x.dim


@rule(
    "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk",
    "hsplit", "vsplit", "dsplit",
)  # fmt: skip
def split(call: OperatorCall) -> Iterator[Strategy]:
    """Pieces of a dimension: each sharded separately (three projections in one matrix), or along another dimension."""
    x, dim = call["self"], _split_dim(call)
    dim_labels = label_dimensions(x, (dim,))
    yield from strategies_by_dimension(
        call, [dim_labels, *map(no_labels, call.inputs[1:])], [dim_labels for _ in call.outputs]
    )
    yield from partial_sums(call, x)
    if len(call.inputs) == 1 and 0 not in x.shape:
        for full_cuts, parts in cuts_of_pieces(call, x, call.outputs, dim):
            targets = [Shard(dim, cuts) for cuts in parts]
            yield call.strategy("pieces", {x.index: Shard(dim, full_cuts)}, targets, local=partial(_split_locally, dim))


def _split_locally(dim: int, edit: RankCall) -> None:
    lengths = [edit.output_shape(i)[dim] for i in range(len(edit.call.outputs))]
    edit.replace(aten.split_with_sizes.default, edit["self"], lengths, dim)


def _cat_dim(call: OperatorCall) -> int | None:
    """Return the dimension along which tensors are joined; None where some must be reshaped first."""
    dims = {v.dim for v in call.inputs}
    if dims != {call.outputs[0].dim}:
        return None  # also torch's legacy: cat ignores a tensor of shape (0,)
    dim = min(dims)
    if call.base in ("cat", "concat", "concatenate"):
        return int(call["dim"]) % dim
    return {"hstack": min(1, dim - 1), "column_stack": 1, "dstack": 2}.get(call.base, 0)


@rule("cat", "concat", "concatenate", "hstack", "vstack", "row_stack", "dstack", "column_stack")
def cat(call: OperatorCall) -> Iterator[Strategy]:
    """Tensors joined along a dimension: each sharded separately, or all along another dimension."""
    yield from partial_sums(call, *call.inputs)
    dim, out = _cat_dim(call), call.outputs[0]
    if dim is None:
        return
    dim_labels = label_dimensions(out, (dim,))
    yield from strategies_by_dimension(call, [dim_labels for _ in call.inputs], [dim_labels])
    if 0 not in out.shape:
        for full_cuts, parts in cuts_of_pieces(call, out, call.inputs, dim):
            yield call.strategy("pieces", {i: Shard(dim, cuts) for i, cuts in enumerate(parts)}, Shard(dim, full_cuts))


@rule("stack")
def stack(call: OperatorCall) -> Iterator[Strategy]:
    """A new dimension, which is not sharded."""
    dim = int(call["dim"]) % call.outputs[0].dim
    dim_labels = label_dimensions(call.inputs[0])
    yield from strategies_by_dimension(
        call, [dim_labels for _ in call.inputs], [[*dim_labels[:dim], None, *dim_labels[dim:]]]
    )
    yield from partial_sums(call, *call.inputs)


# ---- one piece of a dimension ----------------------------------------------------------------------------------------


@rule("unbind")
def unbind(call: OperatorCall) -> Iterator[Strategy]:
    """All elements along a dimension, which is not sharded."""
    x, dim = call["self"], int(call["dim"]) % call["self"].dim
    dim_labels = label_dimensions(x, (dim,))
    yield from strategies_by_dimension(
        call, [dim_labels], [dim_labels[:dim] + dim_labels[dim + 1 :] for _ in call.outputs]
    )
    yield from partial_sums(call, x)


@rule("select")
def select(call: OperatorCall) -> Iterator[Strategy]:
    """One element along a dimension; where that is sharded, its owner has it and all others a partial sum of zero."""
    yield from unbind(call)
    x, dim = call["self"], int(call["dim"]) % call["self"].dim
    if x.dtype.is_floating_point or x.dtype.is_complex:
        for cuts in call.common_cuts(x.at(dim)):
            shard = Shard(dim, cuts)
            yield call.strategy("the owner", {x.index: shard}, PARTIAL, local=_select_locally)


def _select_locally(edit: RankCall) -> None:
    shard = edit.input_shard(edit.call["self"].index)
    at = edit["index"] % shard.size
    slices = _local_slices(shard, edit.index, at, at + 1, 1)
    if slices:
        edit.replace(aten.select.int, edit["self"], shard.dim, slices[0][0])
    else:  # a sum over nothing: zeros, with a gradient of zeros, so that backward collectives match
        none = edit.insert(aten.slice.Tensor, edit["self"], shard.dim, 0, 0)
        edit.replace(aten.sum.dim_IntList, none, [shard.dim])


@rule("slice", "narrow")
def stretch(call: OperatorCall) -> Iterator[Strategy]:
    """A range of a dimension; where that is sharded, every rank keeps what it has of the range, perhaps nothing."""
    x, out, dim = call["self"], call.outputs[0], int(call["dim"]) % call["self"].dim
    dim_labels = label_dimensions(x, (dim,))
    yield from strategies_by_dimension(call, [dim_labels, *map(no_labels, call.inputs[1:])], [dim_labels])
    yield from partial_sums(call, x)
    if len(call.inputs) > 1 or 0 in out.shape:  # a start that depends on the data
        return
    start, stop, step = _slice_bounds(call, x.shape[dim])
    cut_pairs: dict[Cuts, Cuts] = {}
    for cuts in call.common_cuts(x.at(dim)):
        cut_pairs[cuts] = _strided_cuts(cuts, start, out.shape[dim], step)
    # Cuts asked of the result: complete them on both sides, without which the input would have no cut to offer.
    if step == 1 and out.shape[dim] > 1:
        for cuts in call.common_cuts(out.at(dim)):
            for full_cuts in _around(call, cuts, start, stop):
                cut_pairs.setdefault(full_cuts, cuts)
    for source, part in cut_pairs.items():
        yield call.strategy(
            "stretch", {x.index: Shard(dim, source)}, Shard(dim, part), local=partial(_slice_locally, start, stop, step)
        )


def _slice_bounds(call: OperatorCall, size: int) -> tuple[int, int, int]:
    if call.base == "narrow":
        start = call["start"] % max(size, 1)
        return start, start + call["length"], 1
    step = 1 if call["step"] is None else call["step"]
    low, high = (_slice_end(call[name], size, default) for name, default in (("start", 0), ("end", size)))
    return low, high, step


def _slice_end(at: int | None, size: int, default: int) -> int:
    """Return one end of a slice between 0 and ``size``; a negative one counts from the end."""
    if at is None:
        return default
    return traced_max(at + size, 0) if at < 0 else traced_min(at, size)


def _strided_cuts(cuts: Cuts, start: int, length: int, step: int) -> Cuts:
    """Return the cuts of every ``step``-th element from ``start`` on: each rank keeps its own elements."""
    if start == 0 and step == 1 and length == cuts[-1][-1]:
        return cuts
    # Index in the result of the first selected element at or after position p: ceil((p - start) / step).
    segments = [tuple(traced_min(traced_max(-((start - p) // step), 0), length) for p in segment) for segment in cuts]
    return simplify_cuts(tuple(segments))


def _around(call: OperatorCall, cuts: Cuts, start: int, stop: int) -> Iterator[Cuts]:
    """Yield cuts of a dimension whose range [start, stop) is to be cut by ``cuts``.

    Several slices are then one matrix's q, k and v, each cut separately.
    """
    x, dim = call["self"], int(call["dim"])
    size = x.shape[dim]
    sizes = (start, stop - start, size - stop)
    yield simplify_cuts(join_cuts([even_cuts(start, call.degree), cuts, even_cuts(size - stop, call.degree)]))
    for neighbour_cuts in call.common_cuts(x.at(dim)):
        edges = {p for segment in neighbour_cuts for p in (segment[0], segment[-1])}
        if edges.issuperset((start, stop)):
            head_cuts, _, tail_cuts = _clip_cuts(neighbour_cuts, sizes)
            yield simplify_cuts(join_cuts([head_cuts, cuts, tail_cuts]))


def _local_slices(shard: Shard, index: int, start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Return the selected elements of a rank, as (start, stop) in its own part, one per range of its shard."""
    result = []
    for a, b, at in with_offsets(shard.ranges(index)):
        # The first selected position at or after a.
        low = max(start, a + (start - a) % step)
        high = min(stop, b)
        if low < high:
            result.append((at + low - a, at + high - a))
    return result


def _slice_locally(start: int, stop: int, step: int, edit: RankCall) -> None:
    shard = edit.input_shard(edit.call["self"].index)
    slices, dim, x = _local_slices(shard, edit.index, start, stop, step), shard.dim, edit["self"]
    if step == 1 and slices:  # between two local ranges of the slice the rank's part has nothing else
        slices = [(slices[0][0], slices[-1][1])]
    if len(slices) > 1:
        parts = [edit.insert(aten.slice.Tensor, x, dim, a, b, step) for a, b in slices]
        edit.replace(aten.cat.default, parts, dim)
    else:
        a, b = slices[0] if slices else (0, 0)
        edit.replace(aten.slice.Tensor, x, dim, a, b, step)


@rule("select_scatter", "slice_scatter")
def slice_scatter(call: OperatorCall) -> Iterator[Strategy]:
    """A value with a piece of it replaced: all dimensions but the one along which the piece is."""
    x, src, dim = call["self"], call["src"], int(call["dim"]) % call["self"].dim
    dim_labels = label_dimensions(x, (dim,))
    source_labels = dim_labels if src.dim == x.dim else dim_labels[:dim] + dim_labels[dim + 1 :]
    yield from strategies_by_dimension(call, [dim_labels, source_labels], [dim_labels])
    yield from partial_sums(call, x, src)
