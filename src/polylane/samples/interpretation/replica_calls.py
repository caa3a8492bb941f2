"""Data parallelism of one operator: does a rank that has some of the samples make the call that a replica makes?

A placement rule says what each of two ranks computes when samples are cut between them. Only where that is the very
call of a replica which has these samples alone do the parts' values make up the whole's as the rule says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from polylane.graph.capture.assign_keys import DrawnPerSlice
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.precision import unwrap_settings
from polylane.placement.kernels.reduction import ShardedMean
from polylane.placement.operator_view import OperatorNode, TensorKey, bind_arguments
from polylane.placement.placement import REPLICATE, Cuts, Placement, Replicate, Shard, local_shape
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy, TensorValue
from polylane.samples.interpretation.additivity import REPLICAS, State

aten = torch.ops.aten


# They give all that they take, in the same order, or each element several times: the shape of their value says it all.
REFORMING = {"flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"}
EXPANDING = {"broadcast_to", "expand", "expand_as"}
_COPYING = {"to", "_to_copy", "type_as", "alias", "clone", "contiguous", "detach", "lift_fresh_copy"}


def preserves_numbers(call: OperatorCall) -> bool:
    """Whether an operator gives the same numbers, in a type that holds them: whole numbers add up as others do."""
    if call.base not in _COPYING or not call.inputs or call.written_inputs:
        return False
    to, of = call.outputs[0].dtype, call.inputs[0].dtype
    return to.is_floating_point or to.is_complex or to == of or (of is torch.bool and not to.is_floating_point)


def has_same_numbers(call: OperatorCall, own: OperatorCall) -> bool:
    """Whether two calls have the same numbers among their arguments."""

    def plain(value: Any) -> Any:
        if isinstance(value, TensorValue):
            return None
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    return all(plain(call.arguments[name]) == plain(own.arguments[name]) for name in call.arguments)


def selects_by_mask(call: OperatorCall) -> bool:
    """Whether an operator gives the rows that a mask selects."""
    if call.base == "masked_select":
        return True
    if call.base != "index":
        return False
    indices = [i for i in call["indices"] if i is not None]
    return len(indices) == 1 and isinstance(indices[0], TensorValue) and indices[0].dtype is torch.bool


def strip_gradient_placements(placements: Sequence[Placement]) -> list[Placement]:
    """Without regard to gradients."""
    return [REPLICATE if isinstance(p, Replicate) else p for p in placements]


def input_cuts(step: OperatorNode, states: Mapping[TensorKey, State]) -> dict[Place, tuple[Cuts, ...]]:
    """How the dimensions of what an operator reads are cut."""
    placed = [(number, states[key]) for number, key in enumerate(step.input_keys)]
    return {("in", number, p.dim): (p.cuts,) for number, p in placed if isinstance(p, Shard)}


def returns_own_values(strategy: Strategy, call: OperatorCall, own: OperatorCall) -> bool:
    """Whether each of two ranks has what a replica has, and no mere summand of it."""
    every = list(zip(strategy.outputs, call.outputs, own.outputs, strict=True))
    return all(local_shape(whole.shape, p, rank) == part.shape for p, whole, part in every for rank in range(REPLICAS))


def computes_as_replicas(node: fx.Node, call: OperatorCall, own: OperatorCall, strategy: Strategy) -> bool:
    """Whether each of two ranks computes what a replica with its samples does."""
    target = unwrap_settings(node.target)
    if isinstance(target, DrawnPerSlice) or not call.op.startswith("aten."):
        return False  # numbers that each part draws for itself; the user's own Python
    if target is batch_norm:
        return True  # replicas share their statistics
    cut = any(isinstance(p, Shard) for p in strategy.outputs)
    if call.prefix and (node.args[2] is not None) is not cut:
        return False  # the numbers drawn are not the samples' own
    return all(
        (made := compare_rank_call(node, call, own, strategy, rank)) is not None and made.is_same
        for rank in range(REPLICAS)
    )


@dataclass(frozen=True)
class ReplicaCall:
    """What a rank calls, held against what a replica with its samples calls.

    Attributes:
        is_same: it is the same call.
        is_share_of_mean: it is the rank's share of a mean over all samples.
    """

    is_same: bool
    is_share_of_mean: bool


def compare_rank_call(
    node: fx.Node, call: OperatorCall, own: OperatorCall, strategy: Strategy, rank: int
) -> ReplicaCall | None:
    """How the call of one of two ranks compares with a replica's; None where it is more than one operator."""
    graph, names = fx.Graph(), bind_arguments(node, node.args, node.kwargs)[2]
    tensors = [graph.placeholder(f"x{value.index}") for value in call.inputs]
    prefix = fx.map_arg(node.args[: call.prefix], lambda n: graph.placeholder(n.name))

    def edit(of: OperatorCall, outputs: Sequence[Placement]) -> RankCall:
        given = [{"": placement} for placement in outputs]
        return RankCall(
            of, graph, node.target, prefix, _substitute_tensors(tensors, of.arguments), names, given, {"": rank}
        )

    changed = edit(call, strategy.outputs)
    if strategy.local is not None:
        changed.index, changed.strategy, changed.axis = rank, strategy, graph.placeholder("axis")
        strategy.local(changed)
    before = list(graph.nodes)
    made = changed.emit()
    added = [n for n in graph.nodes if n not in before]
    plain = edit(own, strategy.outputs).emit()
    if any(n.op != "placeholder" for n in before) or len(added) > 2:
        return None
    if len(added) == 2:  # the share, times what is the replica's own mean
        inner = added[0]
        is_share = made.target is operator.mul and made.args == (1 / REPLICAS, inner)
        return ReplicaCall(False, is_share and _is_same_call(inner, plain, tensors, call, own))
    is_mean = isinstance(made.target, ShardedMean) and (made.args, made.kwargs) == (plain.args, plain.kwargs)
    return ReplicaCall(_is_same_call(made, plain, tensors, call, own), is_mean)


def _is_same_call(
    made: fx.Node, plain: fx.Node, tensors: Sequence[fx.Node], call: OperatorCall, own: OperatorCall
) -> bool:
    if unwrap_settings(made.target) is unwrap_settings(plain.target) and (made.args, made.kwargs) == (
        plain.args,
        plain.kwargs,
    ):
        return True
    if made.target is aten.slice.Tensor and call.base == "slice":
        return bool(made.args == (tensors[0], *_slice_range(own)))
    in_general = (made.target is aten.reshape.default and call.base in REFORMING) or (
        made.target is aten.expand.default and call.base in EXPANDING
    )
    return in_general and bool(made.args == (tensors[0], list(own.outputs[0].shape)))


def _substitute_tensors(tensors: Sequence[fx.Node], value: Any) -> Any:
    """A call's arguments, on tensors of a graph."""
    if isinstance(value, TensorValue):
        return tensors[value.index]
    if isinstance(value, (list, tuple)):
        return [_substitute_tensors(tensors, each) for each in value]
    return (
        {key: _substitute_tensors(tensors, each) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _slice_range(call: OperatorCall) -> tuple[int, int, int, int]:
    """Along which dimension a slice goes, from where, to where, by which steps."""
    dim = call["dim"] % call["self"].dim
    return dim, *slice(call["start"], call["end"], call["step"]).indices(call["self"].shape[dim])
