"""Weight calls: the calls of a graph that are linear in a weight, whose gradient can be computed at a later time.

A weight value is a parameter, or what is computed from parameters alone (a transpose, a cast, a weight norm). Calls are
found by their ATen operators and by what they read, never by the layers that they came from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.graph import Graph, once_per_graph
from polylane.graph.nodes.facts import unwrap_settings
from polylane.placement.redistribute import Redistribute, collective_name, gradient_ends
from polylane.placement.weight_formulas import WeightFormula, find_formula


def find_weight_calls(
    graph: fx.Graph, is_trained: Callable[[str], bool]
) -> tuple[dict[fx.Node, frozenset[fx.Node]], dict[fx.Node, WeightFormula]]:
    """Return the weight values of a graph, each with the parameters that it depends on, and the calls that read them.

    Args:
        graph: the code of a graph, of a stage, or of one rank.
        is_trained: tells of a parameter's canonical name whether its gradient is computed.
    """
    values = find_weight_values(graph, is_trained)
    calls: dict[fx.Node, WeightFormula] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in values:
            formula = match_weight_call(node, values)
            if formula is not None:
                calls[node] = formula
    return values, calls


@once_per_graph
def find_graph_weight_calls(graph: Graph) -> dict[fx.Node, WeightFormula]:
    """Return the calls of a captured graph that read trained weights, as :func:`find_weight_calls` finds them."""
    return find_weight_calls(graph.code.fx, lambda name: graph.parameters[name].trainable)[1]


def find_weight_values(graph: fx.Graph, is_trained: Callable[[str], bool]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the values that depend on trained parameters alone (and on constants), with these parameters."""
    written = _find_written(graph)
    values: dict[fx.Node, frozenset[fx.Node]] = {}
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node in written:
            continue
        if node.op == "placeholder":
            kind, name = node.meta["role"]
            if kind == "parameter" and is_trained(name):
                values[node] = frozenset([node])
            elif kind in ("parameter", "constant", "axis"):
                constant.add(node)
        elif node.op == "call_function" and _may_wait(node.target):
            reads = node.all_input_nodes
            if all(read in values or read in constant for read in reads):
                parameters = frozenset[fx.Node]().union(*(values[read] for read in reads if read in values))
                if parameters:
                    values[node] = parameters
                else:
                    constant.add(node)
    return values


def _find_written(graph: fx.Graph) -> set[fx.Node]:
    """Return the values that operators write to, and those that they may be views of."""
    written: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        target = unwrap_settings(node.target)
        if target is operator.getitem and node in written:
            written.update(node.all_input_nodes)
        if not isinstance(target, torch._ops.OpOverload):
            continue
        for argument, value in zip(target._schema.arguments, node.args, strict=False):
            alias = argument.alias_info
            if isinstance(value, fx.Node) and alias is not None and (alias.is_write or node in written):
                written.add(value)
    return written


def _may_wait(target: Any) -> bool:
    """Return whether the backward pass of a call on weights alone may run at any time, on each rank by itself.

    Collectives may not: a rank whose part of the samples is empty runs other operators, and defers fewer gradients.
    """
    target = unwrap_settings(target)
    if isinstance(target, Redistribute):
        return not collective_name(*gradient_ends(target.source, target.target))
    return isinstance(target, torch._ops.OpOverload) or target is operator.getitem


def match_weight_call(node: fx.Node, sources: Mapping[fx.Node, frozenset[fx.Node]]) -> WeightFormula | None:
    """Return the formula of a call's weight gradient, if it is to be deferred."""
    target = unwrap_settings(node.target)
    if not isinstance(target, torch._ops.OpOverload):
        return None

    def is_weight(value: Any) -> bool:
        return isinstance(value, fx.Node) and value in sources and not _is_complex(value)

    return find_formula(str(target), _bind_defaults(target, node), is_weight)


def _bind_defaults(target: torch._ops.OpOverload, node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by the names of torch's schema, in its order."""
    schema = target._schema.arguments
    arguments = {**dict(zip([a.name for a in schema], node.args, strict=False)), **node.kwargs}
    return {a.name: arguments.get(a.name, a.default_value) for a in schema}


def positional_arguments(node: fx.Node) -> list[Any]:
    """Return all positional arguments of a call of a torch operator, with their defaults."""
    target = unwrap_settings(node.target)
    bound = _bind_defaults(target, node)
    return [bound[a.name] for a in target._schema.arguments if not a.kwarg_only]


def _is_complex(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_complex()
