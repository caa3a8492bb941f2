"""Sharding rules of operators that only rearrange: views, permutations, expansion and repetition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from string import ascii_letters
from typing import Any, NamedTuple

import torch

from polylane.graph.nodes.facts import find_operator
from polylane.placement.placement import (
    PARTIAL,
    REPLICATE,
    Cuts,
    Placement,
    Shard,
    divide_cuts,
    repeat_cuts,
    scale_cuts,
    simplify_cuts,
    slice_cuts,
)
from polylane.placement.rules.by_dimension import (
    broadcast_labels,
    label_dimensions,
    no_labels,
    partial_sums,
    strategies_by_dimension,
)
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue

aten = torch.ops.aten

# More segments than this mean that a dimension is cut inside nearly every row: useless as a placement.
MOST_SEGMENTS = 1024

# ---- cuts of one dimension in terms of another ----------------------------------------------------------------------


class DimensionBlock(NamedTuple):
    """A dimension among several that are flattened together: product of sizes before it, its size, product after it."""

    outer: int
    size: int
    inner: int


def convert_cuts(cuts: Cuts, source: DimensionBlock, target: DimensionBlock) -> Cuts | None:
    """Return the cuts of another dimension over the same elements that give every rank the same elements.

    Both dimensions run over the elements in the same order: element e is at position ``e // inner % size`` of either.

    Returns:
        The cuts of ``target``; None where no cuts of it give each rank what ``cuts`` of ``source`` do.
    """
    if source == target:
        return cuts
    if source.outer * len(cuts) > MOST_SEGMENTS:
        return None
    # To flat elements: positions become ranges of ``inner`` elements, repeated ``outer`` times; then back to units of
    # the target's ``inner``.
    flat = repeat_cuts(scale_cuts(cuts, source.inner), source.size * source.inner, source.outer)
    rows = divide_cuts(simplify_cuts(flat), target.inner)
    if rows is None:
        return None
    # The first period must describe all: repeat it, and compare with the whole.
    base = simplify_cuts(slice_cuts(rows, 0, target.size))
    if target.outer * len(base) > MOST_SEGMENTS or simplify_cuts(repeat_cuts(base, target.size, target.outer)) != rows:
        return None
    return base


def same_element_cuts(
    call: OperatorCall, source: tuple[Place, DimensionBlock], target: tuple[Place, DimensionBlock]
) -> list[tuple[Cuts, Cuts]]:
    """Return cuts of two dimensions, to be offered for either, that give every rank the same elements of both."""
    (source_place, a), (target_place, b) = source, target
    return call.matching_cuts(
        source_place, target_place, partial(convert_cuts, source=a, target=b), partial(convert_cuts, source=b, target=a)
    )


# ---- views -----------------------------------------------------------------------------------------------------------


def _dimension_groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield groups of dimensions, as small as possible, that hold the same elements in both shapes; without size 1."""
    ins = [d for d, n in enumerate(source) if n != 1]
    outs = [d for d, n in enumerate(target) if n != 1]
    while ins:
        left, right = [ins.pop(0)], [outs.pop(0)]
        a, b = source[left[0]], target[right[0]]
        # Extend the group with the smaller product until both products are equal.
        while a != b:
            if a < b:
                left.append(ins.pop(0))
                a *= source[left[-1]]
            else:
                right.append(outs.pop(0))
                b *= target[right[-1]]
        yield left, right


def _dimension_blocks(shape: Sequence[int], dims: Sequence[int]) -> list[tuple[int, DimensionBlock]]:
    sizes = [shape[d] for d in dims]
    return [(d, DimensionBlock(math.prod(sizes[:i]), sizes[i], math.prod(sizes[i + 1 :]))) for i, d in enumerate(dims)]


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "ravel", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
    "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
def view(call: OperatorCall) -> Iterator[Strategy]:
    """The same elements in the same order: a dimension of one shape is cut where one of the other is cut alike.

    Heads are split off as whole heads; flattened samples and positions become one segment for every sample.
    """
    if "self" not in call.arguments:  # atleast_1d and its like of several tensors
        return
    if call.op == "aten.view.dtype":
        yield from _view_as_type(call)
        return
    x, out = call["self"], call.outputs[0]
    yield from partial_sums(call, x)
    if 0 in x.shape:
        return
    # A second tensor (view_as) only gives a shape: it may be whole, or placed like the output.
    like = [value for value in call.inputs if value is not x]
    for left, right in _dimension_groups(x.shape, out.shape):
        for (i, a), (o, b) in product(_dimension_blocks(x.shape, left), _dimension_blocks(out.shape, right)):
            for in_cuts, out_cuts in same_element_cuts(call, (x.at(i), a), (out.at(o), b)):
                placed, target = {x.index: Shard(i, in_cuts)}, Shard(o, out_cuts)
                for inputs in (placed, *({**placed, value.index: target} for value in like)):
                    yield call.strategy(f"dim {o}", inputs, target, local=_reshape_locally)


def _reshape_locally(edit: RankCall) -> None:
    """Reshape to the local sizes; a part need not be contiguous where the whole tensor is, so that view could fail."""
    edit.replace(aten.reshape.default, edit["self"], list(edit.output_shape()))


def _view_as_type(call: OperatorCall) -> Iterator[Strategy]:
    """The same bytes as another dtype: the last dimension may change its length."""
    x, out = call["self"], call.outputs[0]
    same_size = x.dtype.itemsize == out.dtype.itemsize
    dim_labels = label_dimensions(x, () if same_size else (x.dim - 1,))
    yield from strategies_by_dimension(call, [dim_labels], [dim_labels])


@rule("view_as_complex", "view_as_real")
def complex_view(call: OperatorCall) -> Iterator[Strategy]:
    """Real and imaginary part are a last dimension of two: all other dimensions."""
    x, out = call["self"], call.outputs[0]
    dim_labels = label_dimensions(min(x, out, key=lambda v: v.dim))
    shapes = [[*dim_labels, *[None] * (v.dim - len(dim_labels))] for v in (x, out)]
    yield from strategies_by_dimension(call, shapes[:1], shapes[1:])
    yield from partial_sums(call, x)


# ---- permutations ----------------------------------------------------------------------------------------------------


@rule(
    "permute", "transpose", "t", "numpy_T", "mT", "mH", "matrix_H", "adjoint",
    "movedim", "moveaxis", "swapaxes", "swapdims",
)  # fmt: skip
def permuted(call: OperatorCall) -> Iterator[Strategy]:
    """The same dimensions in another order."""
    x = call["self"]
    options = {name: value for name, value in call.arguments.items() if name != "self"}
    # Distinct sizes identify the dimensions after torch has permuted a tensor without data.
    probe = torch.empty([d + 2 for d in range(x.dim)], device="meta")
    moved = find_operator(call.op)(probe, **options).shape
    yield from strategies_by_dimension(call, [label_dimensions(x)], [[ascii_letters[n - 2] for n in moved]])
    yield from partial_sums(call, x)


# ---- expansion and repetition ----------------------------------------------------------------------------------------


@rule("expand", "expand_as", "broadcast_to")
def expand(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; along an expanded one every rank expands its whole input to its own part."""
    x, out = call["self"], call.outputs[0]
    dim_labels = label_dimensions(out)
    # A second tensor (expand_as) only gives a shape: it may be whole or placed like the output.
    for label in (no_labels, lambda _: dim_labels):
        other_labels = [label(v) for v in call.inputs[1:]]
        yield from strategies_by_dimension(
            call, [broadcast_labels(x, dim_labels), *other_labels], [dim_labels], local=_expand_locally
        )
    yield from partial_sums(call, x)


def _expand_locally(edit: RankCall) -> None:
    edit.replace(aten.expand.default, edit["self"], list(edit.output_shape()))


@rule("broadcast_tensors")
def broadcast_tensors(call: OperatorCall) -> Iterator[Strategy]:
    """All tensors to one shape: those with the dimension are sharded along it, those that broadcast are whole."""
    dim_labels = label_dimensions(call.outputs[0])
    yield from strategies_by_dimension(
        call, [broadcast_labels(v, dim_labels) for v in call.inputs], [dim_labels for _ in call.outputs]
    )
    yield from partial_sums(call, *call.inputs)


def _repeat_counts(dim: int, arguments: Any, name: str) -> list[int]:
    counts = list(arguments[name])
    return [1] * (dim - len(counts)) + counts


@rule("repeat", "tile")
def repeat(call: OperatorCall) -> Iterator[Strategy]:
    """Copies of each rank's part, one segment per copy; or some whole copies on each rank."""
    x, out = call["self"], call.outputs[0]
    yield from partial_sums(call, x)
    if 0 in out.shape:
        return
    name = "repeats" if call.base == "repeat" else "dims"
    for o, times in enumerate(_repeat_counts(out.dim, call.arguments, name)):
        i = o - (out.dim - x.dim)
        size = x.shape[i] if i >= 0 else 1
        if size > 1:
            # The output dimension is ``times`` copies of the input's, one after the other.
            a, b = DimensionBlock(times, size, 1), DimensionBlock(1, times * size, 1)
            for in_cuts, out_cuts in same_element_cuts(call, (x.at(i), a), (out.at(o), b)):
                yield call.strategy(f"dim {o}", {x.index: Shard(i, in_cuts)}, Shard(o, out_cuts))
        if times > 1:
            for cuts in call.common_cuts(out.at(o)):
                if divide_cuts(cuts, size) is not None:
                    yield call.strategy("copies", {}, Shard(o, cuts), local=partial(_repeat_locally, name, o, size))


def _repeat_locally(name: str, dim: int, size: int, edit: RankCall) -> None:
    times = _repeat_counts(len(edit.output_shape()), edit, name)
    times[dim] = edit.output_shape()[dim] // size
    edit[name] = times


@rule("repeat_interleave")
def repeat_interleave(call: OperatorCall) -> Iterator[Strategy]:
    """Every element several times: all copies of an element stay together (grouped key and value heads)."""
    if "self" not in call.arguments:  # from counts to positions: the output's size depends on the data
        return
    x, out, dim = call["self"], call.outputs[0], call["dim"]
    yield from partial_sums(call, x)
    if dim is not None:
        dim_labels = label_dimensions(x, (dim % max(x.dim, 1),))
        yield from strategies_by_dimension(call, [dim_labels, *map(no_labels, call.inputs[1:])], [dim_labels])
    if isinstance(call["repeats"], TensorValue) or 0 in out.shape:
        return
    at = 0 if dim is None else dim % max(x.dim, 1)
    output_block = DimensionBlock(1, out.shape[at], 1)
    dims = range(x.dim) if dim is None else [at]
    for i, block in _dimension_blocks(x.shape, dims):
        # A cut of the input's dimension, in units of ``repeats`` output elements.
        input_block = DimensionBlock(block.outer, block.size, block.inner * call["repeats"])
        for in_cuts, out_cuts in same_element_cuts(call, (x.at(i), input_block), (out.at(at), output_block)):
            yield call.strategy(f"dim {i}", {x.index: Shard(i, in_cuts)}, Shard(at, out_cuts), local=_set_output_size)


def _set_output_size(edit: RankCall) -> None:
    if edit["output_size"] is not None:
        edit["output_size"] = edit.output_shard().local_length(edit.index)


# ---- within dimensions -----------------------------------------------------------------------------------------------


@rule("roll", "flip", "fliplr", "flipud", "rot90")
def turned(call: OperatorCall) -> Iterator[Strategy]:
    """Elements move along some dimensions, which are not sharded."""
    x = call["self"]
    yield from partial_sums(call, x)
    if call.base == "rot90" and int(call["k"]) % 2:  # a quarter turn swaps the two dimensions as well
        return
    dims = {"fliplr": [1], "flipud": [0]}.get(call.base) or call["dims"]
    if dims or call.base == "flip":  # a roll without dimensions runs over the flattened tensor
        dim_labels = label_dimensions(x, [d % max(x.dim, 1) for d in dims])
        yield from strategies_by_dimension(call, [dim_labels], [dim_labels])


@rule("tril", "triu")
def triangle(call: OperatorCall) -> Iterator[Strategy]:
    """One side of a diagonal is zeroed; a shard of rows or columns shifts the diagonal."""
    x = call["self"]
    dim_labels = label_dimensions(x, (x.dim - 2, x.dim - 1))
    yield from strategies_by_dimension(call, [dim_labels], [dim_labels])
    yield from partial_sums(call, x)
    # A shift can describe a contiguous part only.
    for dim, sign in ((x.dim - 2, 1), (x.dim - 1, -1)):
        for cuts in call.common_cuts(x.at(dim)):
            if len(simplify_cuts(cuts)) == 1:
                shard = Shard(dim, cuts)
                yield call.strategy(
                    "columns" if sign < 0 else "rows", {0: shard}, shard, local=partial(_shift_diagonal, sign)
                )


def _shift_diagonal(sign: int, edit: RankCall) -> None:
    ranges = edit.input_shard().ranges(edit.index)
    edit["diagonal"] += sign * (ranges[0][0] if ranges else 0)


@rule("diagonal", "diagonal_copy", "diag_embed")
def diagonal(call: OperatorCall) -> Iterator[Strategy]:
    """A matrix to its diagonal or back: all dimensions but those two."""
    x, out = call["self"], call.outputs[0]
    wide = max(x.dim, out.dim)
    pair = {int(call["dim1"]) % wide, int(call["dim2"]) % wide}
    dim_labels = iter(ascii_letters)
    matrix = [None if d in pair else next(dim_labels) for d in range(wide)]
    line = [c for c in matrix if c is not None] + [None]
    yield from strategies_by_dimension(call, *([[line], [matrix]] if call.base == "diag_embed" else [[matrix], [line]]))
    yield from partial_sums(call, x)


@rule("unfold")
def unfold(call: OperatorCall) -> Iterator[Strategy]:
    """Windows along a dimension, which is not sharded."""
    x = call["self"]
    if x.dim:
        dim_labels = label_dimensions(x, (int(call["dimension"]) % x.dim,))
        yield from strategies_by_dimension(call, [dim_labels], [[*dim_labels, None]])
    yield from partial_sums(call, x)


# ---- constants -------------------------------------------------------------------------------------------------------


@rule("zeros_like", "ones_like", "full_like", "empty_like")
def constant_like(call: OperatorCall) -> Iterator[Strategy]:
    """A constant in another tensor's shape, placed as that one; a partial sum gives the whole shape."""
    dim_labels = label_dimensions(call["self"])
    yield from strategies_by_dimension(call, [dim_labels], [dim_labels])
    yield call.strategy("whole", {0: PARTIAL}, REPLICATE)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def constant(call: OperatorCall) -> Iterator[Strategy]:
    """A constant of any size, with another tensor's dtype: that tensor may have any placement."""
    x, out = call["self"], call.outputs[0]
    anyhow: list[Placement] = [PARTIAL, *(Shard(d, cuts) for d in range(x.dim) for cuts in call.common_cuts(x.at(d)))]
    for placement in anyhow:
        yield call.strategy("whole", {0: placement}, REPLICATE)
    for d in range(out.dim):
        matches = [x.at(d)] if d < x.dim and x.shape[d] == out.shape[d] else []
        for cuts in call.common_cuts(out.at(d), *matches):
            target = Shard(d, cuts)
            placements: list[Placement] = [PARTIAL, REPLICATE, *([target] if matches else [])]
            for placement in placements:
                yield call.strategy(f"dim {d}", {0: placement}, target, local=_create_locally)


def _create_locally(edit: RankCall) -> None:
    edit["size"] = list(edit.output_shape())
