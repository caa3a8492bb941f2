"""Sharding rules of normalizations: independent dimensions, or normalized ones with statistics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from polylane.placement.kernels import normalization as kernels
from polylane.placement.kernels.collective_op import all_reduce_bytes, call_along_axis, collective_strategy
from polylane.placement.kernels.empty_shards import skip_empty_ranks
from polylane.placement.placement import Shard
from polylane.placement.rules.by_dimension import DimLabels, label_dimensions, label_inputs, strategies_by_dimension
from polylane.placement.rules.convolution import strategies_in_units
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy, TensorValue


def _present_inputs(call: OperatorCall, *names: str) -> list[TensorValue]:
    return [value for name in names if isinstance(value := call.arguments.get(name), TensorValue)]


# ---- over features ---------------------------------------------------------------------------------------------------


@rule("layer_norm", "rms_norm", composes=True)
def layer_norm(call: OperatorCall) -> Iterator[Strategy]:
    """All leading dimensions; normalized ones, and the weights with them."""
    yield from leading_dimensions(call)
    x, weights = call["input"], _present_inputs(call, "weight", "bias")
    # Every row has two moments, the mean and the variance; in an RMS norm only the latter.
    kernel, moments = (kernels.ShardedLayerNorm, 2) if call.base == "layer_norm" else (kernels.ShardedRmsNorm, 1)
    function = kernel(call.outputs[0].dtype)
    front = x.dim - len(call["normalized_shape"])
    rows = math.prod(x.shape[:front])
    for dim in range(front, x.dim):
        # Weight and bias have the normalized dimensions only: dimension dim of x is dim - front of theirs.
        places = [x.at(dim), call.outputs[0].at(dim), *(w.at(dim - front) for w in weights)]
        for cuts in call.common_cuts(*places):
            placed = {x.index: Shard(dim, cuts), **{w.index: Shard(dim - front, cuts) for w in weights}}
            # Forward one all-reduce for each moment, backward one for all.
            yield collective_strategy(
                call, "features", placed, Shard(dim, cuts), function,
                rows=rows, sums=2 * moments, messages=moments + 1,
            )  # fmt: skip


@rule("native_layer_norm", "_fused_rms_norm")
def leading_dimensions(call: OperatorCall) -> Iterator[Strategy]:
    """All leading dimensions; the statistics are outputs of some operators."""
    x = call["input"]
    behind = len(call["normalized_shape"])
    dim_labels = [*label_dimensions(x)[: x.dim - behind], *[None] * behind]
    yield from strategies_by_dimension(
        call, label_inputs(call, {x.index: dim_labels}), [dim_labels for _ in call.outputs]
    )


# ---- over channels and space -----------------------------------------------------------------------------------------


@rule("group_norm", composes=True)
def group_norm(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...): samples; channels between groups; space, with every group's sums over all ranks."""
    x, weights = call["input"], _present_inputs(call, "weight", "bias")
    samples = ["n", *[None] * (x.dim - 1)]
    yield from strategies_by_dimension(call, label_inputs(call, {x.index: samples}), [samples], names={"n": "samples"})
    unit = x.shape[1] // call["num_groups"]
    parts = [(x, 1, unit), (call.outputs[0], 1, unit), *((w, 0, unit) for w in weights)]
    groups = call["num_groups"] if unit else 0
    yield from map(skip_empty_ranks, strategies_in_units(call, "channels", groups, parts, _set_local_groups))
    function = kernels.ShardedGroupNorm(unit * math.prod(x.shape[2:]), call.outputs[0].dtype)
    yield from _over_space(call, function, x.shape[0] * call["num_groups"])


def _set_local_groups(edit: RankCall) -> None:
    unit = edit.call["input"].shape[1] // edit.call["num_groups"]
    edit["num_groups"] = edit.output_shard().local_length(edit.index) // unit


def _over_space(call: OperatorCall, function: Any, rows: int) -> Iterator[Strategy]:
    x = call["input"]
    for dim in range(2, x.dim):
        for cuts in call.common_cuts(x.at(dim), call.outputs[0].at(dim)):
            shard = Shard(dim, cuts)
            yield collective_strategy(call, "space", {x.index: shard}, shard, function, rows=rows, sums=4, messages=3)


@rule("instance_norm", composes=True)
def instance_norm(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...): samples, channels; space, with the sums over all ranks."""
    x = call["input"]
    uses_input, running = bool(call["use_input_stats"]), call["running_mean"] is not None
    if uses_input and running:  # running statistics are written in place, from all samples
        return
    dim_labels = label_dimensions(x) if not uses_input else [*label_dimensions(x)[:2], *[None] * (x.dim - 2)]
    yield from map(
        skip_empty_ranks, strategies_by_dimension(call, _per_channel(call, dim_labels), [dim_labels], names=_NAMES)
    )
    if uses_input:
        yield from _over_space(
            call, kernels.ShardedInstanceNorm(math.prod(x.shape[2:]), call.outputs[0].dtype), math.prod(x.shape[:2])
        )


_NAMES = {"a": "samples", "b": "channels"}  # the labels of an input's first two dimensions


def _per_channel(call: OperatorCall, dim_labels: DimLabels) -> list[DimLabels]:
    channels = _present_inputs(call, "weight", "bias", "running_mean", "running_var")
    return label_inputs(call, {call["input"].index: dim_labels, **{value.index: dim_labels[1:2] for value in channels}})


@rule("batch_norm", composes=True)
def batch_norm(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...): channels, with their weights and running statistics; samples and space.

    In training the statistics of a part of the samples or of space are summed over the axis.
    """
    dim_labels = label_dimensions(call["input"])
    training = bool(call["training"])
    # Channels never need communication; other dimensions share statistics in training only.
    labels = "".join(letter for letter in dim_labels if letter)
    inputs = _per_channel(call, dim_labels)
    channels = dim_labels[1] or ""
    other_labels = labels.replace(channels, "")
    yield from map(
        skip_empty_ranks, strategies_by_dimension(call, inputs, [dim_labels], names=_NAMES, skip=other_labels)
    )
    if not training:
        yield from strategies_by_dimension(call, inputs, [dim_labels], names=_NAMES, skip=channels)
    elif call.prefix:
        # Forward one all-reduce of two sums per channel and a count in float64, backward another.
        size = 4 * call["input"].shape[1] + 1
        sent = all_reduce_bytes(size, 8, call.degree, 1)
        for strategy in strategies_by_dimension(
            call, inputs, [dim_labels], names=_NAMES, skip=channels, local=_over_parts
        ):
            yield replace(strategy, sent=sent, messages=2)


def _over_parts(edit: RankCall) -> None:
    call_along_axis(edit, kernels.ShardedBatchNorm(edit.target))


# ---- weights ---------------------------------------------------------------------------------------------------------


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(call: OperatorCall) -> Iterator[Strategy]:
    """v scaled to the norms g along a dimension (Salimans and Kingma, 2016): shards that dimension."""
    v, g, dim = call["v"], call["g"], call["dim"]
    if dim < 0:
        return
    for cuts in call.common_cuts(v.at(dim), g.at(dim), call.outputs[0].at(dim)):
        shard = Shard(dim, cuts)
        yield skip_empty_ranks(call.strategy("filters", {v.index: shard, g.index: shard}, shard))
