"""Replica calls: does a rank that has some of the samples make the same call as a replica with these samples?

A placement rule says what each of two ranks computes if the samples are sharded over them. Only if that equals the call
of a replica that has these samples alone do the parts' values make up the whole's as the rule says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from polylane.graph.capture.assign_keys import DrawnPerSlice
from polylane.graph.interpreter import map_nested
from polylane.graph.nodes.facts import bind_arguments, unwrap_settings
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.placement.kernels.reduction import ShardedMean
from polylane.placement.operator_view import OperatorNode, TensorKey
from polylane.placement.placement import REPLICATE, Cuts, Placement, Replicate, Shard, local_shape
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue
from polylane.samples.interpretation.additivity import REPLICAS, State

aten = torch.ops.aten


# They return all elements in the same order, or repeat each: their output shape says everything about their arguments.
REFORMING = {"flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"}
REFORMING |= {"_unsafe_view"}
EXPANDING = {"broadcast_to", "expand", "expand_as"}
COPYING = {"to", "_to_copy", "type_as", "alias", "clone", "contiguous", "detach", "lift_fresh_copy"}


def preserves_numbers(call: OperatorCall) -> bool:
    """Return whether an operator copies its input to a dtype that holds the values: sums of parts stay sums."""
    if call.base not in COPYING or not call.inputs or call.written_inputs:
        return False
    to, of = call.outputs[0].dtype, call.inputs[0].dtype
    return to.is_floating_point or to.is_complex or to == of or (of is torch.bool and not to.is_floating_point)


def has_same_numbers(call: OperatorCall, replica_call: OperatorCall) -> bool:
    """Return whether two calls have equal arguments besides tensors."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, TensorValue) else value

    return all(
        map_nested(plain, call.arguments[name]) == map_nested(plain, replica_call.arguments[name])
        for name in call.arguments
    )


def selects_by_mask(call: OperatorCall) -> bool:
    """Return whether an operator selects rows by a boolean mask."""
    if call.base == "masked_select":
        return True
    if call.base != "index":
        return False
    indices = [i for i in call["indices"] if i is not None]
    return len(indices) == 1 and isinstance(indices[0], TensorValue) and indices[0].dtype is torch.bool


def strip_gradient_placements(placements: Sequence[Placement]) -> list[Placement]:
    """Return placements with every kind of replication reduced to the plain one, whatever happens to gradients."""
    return [REPLICATE if isinstance(p, Replicate) else p for p in placements]


def input_cuts(step: OperatorNode, states: Mapping[TensorKey, State]) -> dict[Place, tuple[Cuts, ...]]:
    """Return the cuts of every sharded input dimension of an operator."""
    placed = [(number, states[key]) for number, key in enumerate(step.input_keys)]
    return {("in", number, p.dim): (p.cuts,) for number, p in placed if isinstance(p, Shard)}


def returns_own_values(strategy: Strategy, call: OperatorCall, replica_call: OperatorCall) -> bool:
    """Return whether each rank's local output has the shape of a replica's output."""
    outputs = list(zip(strategy.outputs, call.outputs, replica_call.outputs, strict=True))
    return all(
        local_shape(full_output.shape, p, rank) == part.shape
        for p, full_output, part in outputs
        for rank in range(REPLICAS)
    )


def computes_as_replicas(node: fx.Node, call: OperatorCall, replica_call: OperatorCall, strategy: Strategy) -> bool:
    """Return whether each of two ranks computes what a replica with its samples computes."""
    target = unwrap_settings(node.target)
    if isinstance(target, DrawnPerSlice) or not call.op.startswith("aten."):
        return False  # per-part random numbers, or user code
    if target is batch_norm:
        return True  # SyncBatchNorm
    cut = any(isinstance(p, Shard) for p in strategy.outputs)
    # args[:3] of a keyed random operator: sample slice, key, and the dimension of the samples, or None.
    if call.prefix and (node.args[2] is not None) is not cut:
        return False  # the numbers drawn are not the samples' own
    return compare_rank_calls(node, call, replica_call, strategy).is_same


@dataclass(frozen=True)
class ReplicaCall:
    """Comparison of ranks' calls with those of replicas that have the same samples.

    Attributes:
        is_same: whether the calls are equal.
        is_share_of_mean: whether the ranks compute their shares of a mean over all samples.
    """

    is_same: bool
    is_share_of_mean: bool


def compare_rank_calls(
    node: fx.Node, call: OperatorCall, replica_call: OperatorCall, strategy: Strategy
) -> ReplicaCall:
    """Compare the calls of two ranks with a replica's; neither is so of a rank that runs several operators."""
    comparisons = [_compare_rank_call(node, call, replica_call, strategy, rank) for rank in range(REPLICAS)]
    return ReplicaCall(
        all(comparison.is_same for comparison in comparisons),
        all(comparison.is_share_of_mean for comparison in comparisons),
    )


def _compare_rank_call(
    node: fx.Node, call: OperatorCall, replica_call: OperatorCall, strategy: Strategy, rank: int
) -> ReplicaCall:
    graph, names = fx.Graph(), bind_arguments(node)[2]
    tensors = [graph.placeholder(f"x{value.index}") for value in call.inputs]
    prefix = fx.map_arg(node.args[: call.prefix], lambda n: graph.placeholder(n.name))

    def edit(of: OperatorCall, outputs: Sequence[Placement]) -> RankCall:
        placements = [{"": placement} for placement in outputs]
        arguments = map_nested(lambda v: tensors[v.index] if isinstance(v, TensorValue) else v, of.arguments)
        return RankCall(of, graph, node.target, prefix, arguments, names, placements, {"": rank})

    # Emit the rank's call and the replica's into one scratch graph, on the same placeholders, and compare the nodes.
    changed = edit(call, strategy.outputs)
    if strategy.local is not None:
        changed.index, changed.strategy, changed.axis = rank, strategy, graph.placeholder("axis")
        strategy.local(changed)
    old_nodes = list(graph.nodes)
    rank_node = changed.emit()
    added = [n for n in graph.nodes if n not in old_nodes]
    plain = edit(replica_call, strategy.outputs).emit()
    if any(n.op != "placeholder" for n in old_nodes) or len(added) > 2:
        return ReplicaCall(False, False)
    if len(added) == 2:  # (1 / ranks) times the replica's own mean
        inner = added[0]
        is_share = rank_node.target is operator.mul and rank_node.args == (1 / REPLICAS, inner)
        return ReplicaCall(False, is_share and _is_same_call(inner, plain, tensors, call, replica_call))
    is_mean = isinstance(rank_node.target, ShardedMean) and (rank_node.args, rank_node.kwargs) == (
        plain.args,
        plain.kwargs,
    )
    return ReplicaCall(_is_same_call(rank_node, plain, tensors, call, replica_call), is_mean)


def _is_same_call(
    rank_node: fx.Node, plain: fx.Node, tensors: Sequence[fx.Node], call: OperatorCall, replica_call: OperatorCall
) -> bool:
    if unwrap_settings(rank_node.target) is unwrap_settings(plain.target) and (rank_node.args, rank_node.kwargs) == (
        plain.args,
        plain.kwargs,
    ):
        return True
    # The rewrite normalizes slices, reshapes and expands to explicit sizes: compare these with the replica's.
    if rank_node.target is aten.slice.Tensor and call.base == "slice":
        return bool(rank_node.args == (tensors[0], *_slice_range(replica_call)))
    in_general = (rank_node.target is aten.reshape.default and call.base in REFORMING) or (
        rank_node.target is aten.expand.default and call.base in EXPANDING
    )
    return in_general and bool(rank_node.args == (tensors[0], list(replica_call.outputs[0].shape)))


def _slice_range(call: OperatorCall) -> tuple[int, int, int, int]:
    """Return dimension, start, end and step of a slice, with negative values resolved."""
    dim = call["dim"] % call["self"].dim
    return dim, *slice(call["start"], call["end"], call["step"]).indices(call["self"].shape[dim])
