"""Sharding rules of reductions, scans, sorting and softmax: by kept dimensions, or by reduced ones with collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from string import ascii_letters
from typing import Any

from polylane.placement.kernels import reduction as kernels
from polylane.placement.kernels.collective_op import all_reduce_bytes, call_along_axis, collective_strategy
from polylane.placement.placement import PARTIAL, REPLICATE, Placement, Shard
from polylane.placement.rules.by_dimension import (
    DimLabels,
    broadcast_input_labels,
    label_dimensions,
    partial_sums,
    strategies_by_dimension,
)
from polylane.placement.rules.pointwise import pointwise
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy


def _reduced_dims(call: OperatorCall) -> list[int]:
    """Return the reduced dimensions, counted from 0; all of them where none is named."""
    x, dims = call.inputs[0], call.arguments.get("dim")
    if dims is None or dims == []:
        return list(range(x.dim))
    return sorted({d % max(x.dim, 1) for d in ([dims] if isinstance(dims, int) else dims)} if x.dim else ())


def _kept_labels(dim_labels: DimLabels, call: OperatorCall, dims: Sequence[int]) -> list[str | None]:
    """Return the labels of a reduction's output."""
    if call.arguments.get("keepdim"):
        return [None if d in dims else letter for d, letter in enumerate(dim_labels)]
    return [letter for d, letter in enumerate(dim_labels) if d not in dims]


@rule(
    "nanmean", "prod", "aminmax", "median", "nanmedian", "mode", "kthvalue", "linalg_norm",
    "linalg_matrix_norm",
)  # fmt: skip
def cut_kept_dims(call: OperatorCall) -> Iterator[Strategy]:
    """Dimensions that are not reduced."""
    dims = _reduced_dims(call)
    dim_labels = label_dimensions(call.inputs[0], dims)
    labels = _kept_labels(dim_labels, call, dims)
    if all(out.dim == len(labels) for out in call.outputs):
        yield from strategies_by_dimension(call, [dim_labels], [labels for _ in call.outputs])


@rule("argmax", "argmin")
def position_of_extreme(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; of everything (no ``dim``) the position is one in the whole tensor, which must be whole."""
    yield from cut_kept_dims(call)
    x, dim = call.inputs[0], call.arguments.get("dim")
    if dim is None or not x.dim or x.dtype.is_complex:
        return
    (dim,) = _reduced_dims(call)
    rows = math.prod(n for d, n in enumerate(x.shape) if d != dim)
    local = partial(_find_position_in_part, dim=dim)
    for cuts in call.common_cuts(x.at(dim)):
        sent = all_reduce_bytes(rows, call.outputs[0].dtype.itemsize, call.degree, 2)
        name, part = f"over dim {ascii_letters[dim]}", {0: Shard(dim, cuts)}
        yield call.strategy(name, part, REPLICATE, local=local, sent=sent, messages=2)


def _find_position_in_part(edit: RankCall, dim: int) -> None:
    """Make a rank look for the extreme in its part of a dimension, whose positions are those of the whole."""
    ranges, keepdim = edit.input_shard().ranges(edit.index), bool(edit.call.arguments.get("keepdim"))
    size, sign = edit.call.inputs[0].shape[dim], 1 if edit.call.base == "argmax" else -1
    call_along_axis(edit, kernels.ShardedPosition(dim, keepdim, size, sign, ranges))


@rule("nansum", "count_nonzero")
def cut_any_dim(call: OperatorCall, local: Callable[[RankCall], None] | None = None) -> Iterator[Strategy]:
    """Any dimension; over a reduced one the outputs are partial sums."""
    dims = _reduced_dims(call)
    dim_labels = label_dimensions(call.inputs[0])
    labels = _kept_labels(dim_labels, call, dims)
    if call.outputs[0].dim == len(labels):
        added = "".join(dim_labels[d] or "" for d in dims)
        skip = "".join(letter for letter in dim_labels if letter and letter not in added)
        # Twice, for kept and for reduced dimensions: only the latter are summed over and change the local call.
        yield from strategies_by_dimension(call, [dim_labels], [labels], skip=added)
        yield from strategies_by_dimension(
            call,
            [dim_labels],
            [labels],
            names={c: f"over dim {c}" for c in added},
            summed=added,
            local=local,
            skip=skip,
        )


def _cut_reduced_dim(
    call: OperatorCall, function: Any, outputs: Placement | Sequence[Placement], sums: int
) -> Iterator[Strategy]:
    """Yield shards of a reduced dimension; the operator all-reduces its remaining values ``sums`` times."""
    x, dims = call.inputs[0], _reduced_dims(call)
    if x.dtype.is_complex:
        return
    rows = math.prod(n for d, n in enumerate(x.shape) if d not in dims)
    for dim in dims:
        for cuts in call.common_cuts(x.at(dim)):
            name, part = f"over dim {ascii_letters[dim]}", {0: Shard(dim, cuts)}
            yield collective_strategy(call, name, part, outputs, function, rows=rows, sums=sums, messages=sums)


@rule("sum")
def sum_(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension, and partial sums."""
    yield from cut_any_dim(call)
    yield from partial_sums(call, call.inputs[0])


@rule("mean")
def mean(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; a rank's sum is divided by the whole count."""
    yield from cut_any_dim(call, local=_divide_by_whole_count)
    yield from partial_sums(call, call.inputs[0])


def _divide_by_whole_count(edit: RankCall) -> None:
    shape = edit.call.inputs[0].shape
    edit.target = kernels.ShardedMean(math.prod(shape[d] for d in _reduced_dims(edit.call)), edit.call.outputs[0].dtype)


@rule("max", "min", "amax", "amin", "any", "all", composes=True)
def extreme(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension, unless indices are returned; max and min of two tensors are pointwise."""
    if len(call.inputs) == 2:
        yield from pointwise(call)
        return
    yield from cut_kept_dims(call)
    if len(call.outputs) == 1:
        sign = 1 if call.base in ("max", "amax", "any") else -1
        dims, keepdim = _reduced_dims(call), bool(call.arguments.get("keepdim"))
        function = kernels.ShardedExtreme(dims, keepdim, call.outputs[0].dtype, sign, call.base in ("any", "all"))
        # Two all-reduces for floating types: the extreme, and the number of equal ones for the gradient.
        yield from _cut_reduced_dim(call, function, REPLICATE, 2 if call.outputs[0].dtype.is_floating_point else 1)


@rule("logsumexp", "special_logsumexp", composes=True)
def logsumexp(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension."""
    yield from cut_kept_dims(call)
    function = kernels.ShardedReduction(kernels.LogSumExp, _reduced_dims(call), call["keepdim"], call.outputs[0].dtype)
    yield from _cut_reduced_dim(call, function, REPLICATE, 2)


@rule("var", "std", "var_mean", "std_mean", composes=True)
def variance(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; over a sharded one the mean is all-reduced first."""
    yield from cut_kept_dims(call)
    dims, keepdim = _reduced_dims(call), bool(call.arguments.get("keepdim"))
    argument = call.arguments.get("correction")
    correction = float(call.arguments.get("unbiased", True) if argument is None else argument)
    count = math.prod(call.inputs[0].shape[d] for d in dims)
    root = call.base.startswith("std")
    function = kernels.ShardedVariance(
        dims, keepdim, count, correction, root, call.base.endswith("mean"), call.outputs[0].dtype
    )
    yield from _cut_reduced_dim(call, function, REPLICATE if root else PARTIAL, len(call.outputs) + root if root else 1)


@rule("norm", "linalg_vector_norm", composes=True)
def norm(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension for positive orders: powers are added."""
    order = call.arguments.get("p", call.arguments.get("ord"))
    order = 2.0 if order is None else float(order)
    if order == 1.0 and not call.inputs[0].dtype.is_complex:
        yield from cut_any_dim(call)
        return
    yield from cut_kept_dims(call)
    if 0.0 < order < math.inf:
        dims, keepdim = _reduced_dims(call), bool(call.arguments.get("keepdim"))
        function = kernels.ShardedReduction(kernels.PowerNorm, dims, keepdim, call.outputs[0].dtype, order)
        yield from _cut_reduced_dim(call, function, REPLICATE, 1)


@rule("softmax", "log_softmax", "special_softmax", "special_log_softmax", "_softmax", "_log_softmax", "_safe_softmax")
def softmax(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; over a cut one the ranks reduce the maximum and the sum, backward a sum again."""
    yield from along(call)
    x, out = call.inputs[0], call.outputs[0]
    if not x.dim:
        return
    dim = call["dim"] % x.dim
    function = kernels.ShardedSoftmax(dim, out.dtype, "log" in call.base, "safe" in call.base)
    rows = math.prod(x.shape) // max(x.shape[dim], 1)
    for cuts in call.common_cuts(x.at(dim), out.at(dim)):
        name, shard = f"over dim {ascii_letters[dim]}", Shard(dim, cuts)
        yield collective_strategy(call, name, {0: shard}, shard, function, rows=rows, sums=3, messages=3)


@rule("cumsum")
def cumsum(call: OperatorCall) -> Iterator[Strategy]:
    """Every other dimension, and partial sums."""
    yield from along(call)
    yield from partial_sums(call, call.inputs[0])


@rule("cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "msort")
def along(call: OperatorCall) -> Iterator[Strategy]:
    """Every dimension but the one along which they work."""
    x = call.inputs[0]
    if x.dim:
        dim_labels = label_dimensions(x, [call.arguments.get("dim", 0) % x.dim])
        yield from strategies_by_dimension(call, [dim_labels], [dim_labels for _ in call.outputs])


@rule("cosine_similarity")
def cosine_similarity(call: OperatorCall) -> Iterator[Strategy]:
    """Every dimension but the one of the vectors."""
    out, places = call.outputs[0], max(v.dim for v in call.inputs)
    along = call["dim"] % max(places, 1)
    dim_labels = label_dimensions(out)
    dim_labels.insert(along, None)
    yield from strategies_by_dimension(
        call, broadcast_input_labels(call, dim_labels), [dim_labels[:along] + dim_labels[along + 1 :]]
    )


@rule("pairwise_distance")
def pairwise_distance(call: OperatorCall) -> Iterator[Strategy]:
    """Every dimension but the last one, that of the vectors."""
    dim_labels = label_dimensions(call.outputs[0])
    places = dim_labels if call["keepdim"] else [*dim_labels, None]
    yield from strategies_by_dimension(call, broadcast_input_labels(call, places), [dim_labels])


@rule("diff")
def diff(call: OperatorCall) -> Iterator[Strategy]:
    """Every dimension but the one along which neighbours are subtracted, and partial sums."""
    x = call.inputs[0]
    dim_labels = label_dimensions(x, [call["dim"] % max(x.dim, 1)])
    yield from strategies_by_dimension(call, [dim_labels for _ in call.inputs], [dim_labels])
    yield from partial_sums(call, *call.inputs)
