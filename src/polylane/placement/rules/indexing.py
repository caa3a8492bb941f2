"""Sharding rules of operators that read and write at tensors of positions: index, gather, scatter and their like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_uppercase

import torch

from polylane.placement.rules.by_dimension import (
    DimLabels,
    broadcast_labels,
    label_dimensions,
    label_inputs,
    no_labels,
    partial_sums,
    strategies_by_dimension,
)
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Strategy, TensorValue


def _is_mask(index: TensorValue) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _index_labels(
    x: TensorValue, indices: Sequence[TensorValue | None]
) -> tuple[list[str | None], list[str | None], list[str | None]]:
    """Return the labels of an indexed value, of the positions (broadcast together), and of the result."""
    # A boolean mask stands for as many dimensions as it has itself; ``at`` runs through the value's dimensions.
    touched: list[int] = []
    at = 0
    for index in indices:
        width = index.dim if index is not None and _is_mask(index) else 1
        touched += range(at, at + width) if index is not None else ()
        at += width
    tensors = [i for i in indices if i is not None]
    labels = label_dimensions(x, touched)
    masked = any(map(_is_mask, tensors))  # the number of selected rows depends on the data: not sharded
    wide = [None if masked else c for c in ascii_uppercase[: max((1 if _is_mask(i) else i.dim) for i in tensors)]]
    other_labels = [letter for d, letter in enumerate(labels) if d not in touched]
    adjacent = touched == list(range(touched[0], touched[0] + len(touched)))
    position = touched[0] if adjacent else 0  # as in numpy: otherwise positions come first
    return labels, wide, other_labels[:position] + wide + other_labels[position:]


def _position_labels(index: TensorValue, wide: Sequence[str | None]) -> list[str | None]:
    return no_labels(index) if _is_mask(index) else broadcast_labels(index, wide)


def _has_plain_positions(x: TensorValue, indices: Sequence[TensorValue | None]) -> bool:
    """Return whether there are positions, and none that add a dimension (a mask without dimensions)."""
    tensors = [i for i in indices if i is not None]
    return bool(tensors) and x.dim <= 26 and not any(_is_mask(i) and i.dim == 0 for i in tensors)


def _masked_dimensions(x: TensorValue, indices: Sequence[TensorValue | None]) -> DimLabels | None:
    """Return the labels of the dimensions of ``x`` that a mask stands for, if that is the only index."""
    entries = [(at, i) for at, i in enumerate(indices) if i is not None]
    if len(entries) != 1 or x.dim > 26 or not _is_mask(entries[0][1]) or entries[0][1].dim == 0:
        return None
    at, mask = entries[0]
    return label_dimensions(x)[at : at + mask.dim]


@rule("index")
def index(call: OperatorCall) -> Iterator[Strategy]:
    """x at positions: shard dimensions that are not indexed, or the positions themselves."""
    x, indices = call["self"], call["indices"]
    yield from partial_sums(call, x)
    if _has_plain_positions(x, indices):
        labels, wide, result = _index_labels(x, indices)
        yield from strategies_by_dimension(
            call, [labels, *(_position_labels(i, wide) for i in indices if i is not None)], [result]
        )


@rule("searchsorted")
def search(call: OperatorCall) -> Iterator[Strategy]:
    """Values to their places in a sorted sequence: any dimension of a common one; of many, those before the last."""
    sequence, values, sorter = call["sorted_sequence"], call["self"], call.arguments.get("sorter")
    if not isinstance(values, TensorValue):  # a number
        return
    labels = label_dimensions(values, uncut=[] if sequence.dim == 1 else [values.dim - 1])
    of_sequence = no_labels(sequence) if sequence.dim == 1 else [*labels[:-1], None]
    sequence_labels = {value.index: of_sequence for value in (sequence, sorter) if value is not None}
    yield from strategies_by_dimension(call, label_inputs(call, {**sequence_labels, values.index: labels}), [labels])


@rule("index_put")
def index_put(call: OperatorCall) -> Iterator[Strategy]:
    """x with values written at positions: dimensions that are not indexed; with accumulate, also the positions."""
    x, values, indices = call["self"], call["values"], call["indices"]
    yield from partial_sums(call, x, values)
    masked, labels = _masked_dimensions(x, indices), label_dimensions(x)
    # Dimensions after those that a mask at the beginning stands for: a value of these alone is the same wherever it is.
    tail = labels[len(masked) :] if masked is not None and indices[0] is not None else []
    if masked is not None and (values.count == 1 or values.dim <= len(tail)):  # elementwise
        written = broadcast_labels(values, tail) if values.dim <= len(tail) else no_labels(values)
        yield from strategies_by_dimension(call, [labels, masked, written], [labels])
        return
    if not _has_plain_positions(x, indices):
        return
    labels, wide, result = _index_labels(x, indices)
    if values.dim > len(result):
        return
    dim_labels = [
        labels,
        *(_position_labels(i, wide) for i in indices if i is not None),
        broadcast_labels(values, result),
    ]
    positions = "".join(letter for letter in wide if letter)
    yield from _write_strategies(call, dim_labels, labels, positions, call["accumulate"])


def _write_strategies(
    call: OperatorCall, inputs: Sequence[DimLabels], labels: DimLabels, positions: str, adds: bool
) -> Iterator[Strategy]:
    """Yield shards of dimensions that are not indexed, and of the positions where written values add up.

    Args:
        call: the operator, which returns its input "self" with other values at positions.
        inputs: a label for every dimension of every input.
        labels: labels of "self" and of the result.
        positions: labels of the positions.
        adds: whether values are added; overwriting ones would depend on which rank writes last.
    """
    yield from strategies_by_dimension(
        call, inputs, [labels],
        names=dict.fromkeys(positions, "positions"), added=[call["self"].index],
        summed=positions if adds else "", skip="" if adds else positions,
    )  # fmt: skip


@rule("index_select")
def index_select(call: OperatorCall) -> Iterator[Strategy]:
    """Slices of x at positions: other dimensions, or the positions."""
    x, at = call["self"], call["index"]
    yield from partial_sums(call, x)
    if x.dim and at.dim:
        dim = int(call["dim"]) % x.dim
        labels = label_dimensions(x, (dim,))
        yield from strategies_by_dimension(call, [labels, ["P"]], [[*labels[:dim], "P", *labels[dim + 1 :]]])


@rule("gather", "take_along_dim")
def gather(call: OperatorCall) -> Iterator[Strategy]:
    """One element for each position, along one dimension: dimensions that both tensors have, or the positions."""
    x, out = call["self"], call.outputs[0]
    at = call["index" if call.base == "gather" else "indices"]
    yield from partial_sums(call, x)
    if x.dim == 0 or x.dim != out.dim or x.dim != at.dim or call["dim"] is None:
        return
    dim = int(call["dim"]) % x.dim
    dim_labels = label_dimensions(out)
    if call.base == "gather":  # positions may have fewer rows than the value: then rows do not correspond
        dim_labels = [
            c if x.shape[d] == n or d == dim else None
            for d, (c, n) in enumerate(zip(dim_labels, at.shape, strict=True))
        ]
    labels = broadcast_labels(x, dim_labels)
    labels[dim] = None
    yield from strategies_by_dimension(call, [labels, broadcast_labels(at, dim_labels)], [dim_labels])


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(call: OperatorCall) -> Iterator[Strategy]:
    """Elements written to positions along one dimension: other dimensions; where they add up, also the positions."""
    x, at, src = call["self"], call["index"], call.arguments.get("src")
    kind = "sum" if call.base == "scatter_add" else call.arguments.get("reduce", "put")
    if src is not None and kind in ("sum", "add", "mean", "put"):
        yield from partial_sums(call, x, src)
    if x.dim == 0 or at.dim != x.dim or (src is not None and src.dim != x.dim):
        return
    dim = int(call["dim"]) % x.dim
    tensors = [x, at] if src is None else [x, at, src]
    # Only dimensions of equal length in all tensors can be cut alike.
    labels = label_dimensions(x, [d for d in range(x.dim) if d == dim or len({v.shape[d] for v in tensors}) > 1])
    lists = [list(labels) for _ in tensors]
    adds = src is not None and kind in ("sum", "add") and call.arguments.get("include_self", True)
    if src is not None and src.shape[dim] == at.shape[dim]:
        lists[1][dim] = lists[2][dim] = "P"
    dim_labels = dict(zip([v.index for v in tensors], lists, strict=True))
    yield from _write_strategies(call, label_inputs(call, dim_labels), labels, "P", adds)


@rule("index_add", "index_copy", "index_fill")
def index_add(call: OperatorCall) -> Iterator[Strategy]:
    """Slices written to positions: other dimensions; where they add up, also the positions."""
    x, at, source = call["self"], call["index"], call.arguments.get("source")
    if source is not None:
        yield from partial_sums(call, x, source)
    if x.dim == 0 or at.dim == 0 or (source is not None and source.dim != x.dim):
        return
    dim, adds = int(call["dim"]) % x.dim, call.base == "index_add"
    labels = label_dimensions(x, (dim,))
    dim_labels: dict[int, DimLabels] = {x.index: labels, at.index: ["P"]}
    if source is not None:
        dim_labels[source.index] = [*labels[:dim], "P", *labels[dim + 1 :]]
    yield from _write_strategies(call, label_inputs(call, dim_labels), labels, "P", adds)


@rule("one_hot")
def one_hot(call: OperatorCall) -> Iterator[Strategy]:
    """A new last dimension of classes; without ``num_classes`` their number depends on the data of all ranks."""
    dim_labels = label_dimensions(call["self"])
    if call["num_classes"] >= 0:
        yield from strategies_by_dimension(call, [dim_labels], [[*dim_labels, None]])
