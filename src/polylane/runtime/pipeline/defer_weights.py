"""Stage code for backward passes in two halves: calls that are linear in a weight read it detached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from polylane.graph.nodes.facts import unwrap_settings
from polylane.placement.kernels.joint_gradients import wrap_like
from polylane.placement.overlap import hold, linear
from polylane.placement.weight_calls import find_weight_calls, positional_arguments
from polylane.placement.weight_formulas import WeightFormula, operand_at
from polylane.runtime.pipeline.weight_gradients import DEFERRED, DeferredCall, WeightBoundary


def defer_weight_gradients(graph: fx.Graph, is_trained: Callable[[str], bool]) -> tuple[int, ...]:
    """Rewrite a stage's code, in place, for backward passes in two halves.

    Args:
        graph: the code as one rank runs it; it gets a placeholder with the role :data:`DEFERRED`, before all others.
        is_trained: tells of a parameter's canonical name whether its gradient is computed.

    Returns:
        For each weight value (a parameter, or what is computed from parameters alone, that a call reads) its group:
        values whose gradients go back to a common parameter. Empty where nothing can be deferred.
    """
    _release_held_weights(graph)
    sources, calls = find_weight_calls(graph, is_trained)
    if not calls:
        return ()
    group_of = _group_parameters(sources, calls)
    return _write_boundaries(graph, {n: p for n, p in sources.items() if p & group_of.keys()}, calls, group_of)


def _release_held_weights(graph: fx.Graph) -> None:
    """Make plain linear layers of those that compute their weight's gradient late within one backward pass."""
    for node in list(graph.nodes):
        if node.target is linear:
            weight = node.args[1]
            node.target = torch.ops.aten.linear.default
            node.args = (node.args[0], weight.args[0] if weight.target is hold else weight, *node.args[2:])
            if weight.target is hold and not weight.users:
                graph.erase_node(weight)


def _keyword_only(node: fx.Node) -> set[str]:
    return {a.name for a in unwrap_settings(node.target)._schema.arguments if a.kwarg_only}


def _find_operands(formula: WeightFormula, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the weight of a call, then the bias if its gradient is deferred too."""
    args = positional_arguments(node)
    yield operand_at(args, formula.weight)
    if formula.bias is not None:
        yield operand_at(args, formula.bias)


def _group_parameters(
    sources: Mapping[fx.Node, frozenset[fx.Node]], calls: Mapping[fx.Node, WeightFormula]
) -> dict[fx.Node, int]:
    """Return the groups of the parameters whose gradients are deferred.

    Parameters from which one value is computed are in one group: that value's backward pass runs once, with all of its
    gradient, and through all of them.
    """
    groups: list[set[fx.Node]] = []
    for parameters in sources.values():
        joined = set(parameters)
        for group in [group for group in groups if group & joined]:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    read = {p for node, formula in calls.items() for weight in _find_operands(formula, node) for p in sources[weight]}
    return {parameter: i for i, group in enumerate(groups) if group & read for parameter in group}


def _write_boundaries(
    graph: fx.Graph,
    late: Mapping[fx.Node, frozenset[fx.Node]],
    calls: Mapping[fx.Node, WeightFormula],
    group_of: Mapping[fx.Node, int],
) -> tuple[int, ...]:
    """Write the readers of weight values anew: deferred calls, and those that read a cut leaf."""
    first_node = next(iter(graph.nodes))
    with graph.inserting_before(first_node):
        deferred = graph.placeholder("deferred")
    deferred.meta = {**_labels(first_node), "role": DEFERRED}
    after_inputs = next(node for node in graph.nodes if node.op != "placeholder")
    operands = {node: list(_find_operands(formula, node)) for node, formula in calls.items()}
    slots: list[int] = []
    slot_of: dict[fx.Node, int] = {}
    for value, parameters in late.items():
        readers = [user for user in value.users if user not in late]
        if not readers:
            continue
        slot_of[value] = slot = len(slots)
        slots.append(group_of[next(iter(parameters))])
        next_node = after_inputs if value.op == "placeholder" else value.next
        for cuts in (False, True):
            chosen = [reader for reader in readers if (reader not in calls) == cuts]
            if not chosen:
                continue
            with graph.inserting_before(next_node):
                boundary = graph.call_function(WeightBoundary(slot, cuts), (deferred, value))
            boundary.meta = _labels(chosen[0] if value.op == "placeholder" else value)
            for reader in chosen:
                reader.replace_input_with(value, boundary)
    for node, formula in calls.items():
        call_slots = tuple(slot_of[weight] for weight in operands[node])
        call = DeferredCall(unwrap_settings(node.target), formula, call_slots, str(node.meta.get("name", node.name)))
        node.args = (deferred, *positional_arguments(node))
        node.kwargs = {k: v for k, v in node.kwargs.items() if k in _keyword_only(node)}
        node.target = wrap_like(node.target, call)
    return tuple(slots)


def _labels(node: fx.Node) -> dict[str, Any]:
    """Return the meta of a node that is inserted for another one."""
    return {**{k: v for k, v in node.meta.items() if k in ("name", "module", "stack_trace", "turn")}, "stands": False}
