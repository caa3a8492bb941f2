"""Memory of values: which arguments an operator writes in place, and which values may share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.facts import unwrap_settings

# These may return their argument itself, without an alias annotation in their schema.
_SILENT_ALIASES = (
    "aten.dropout.default",
    "aten.feature_dropout.default",
    "aten.alpha_dropout.default",
    "aten.feature_alpha_dropout.default",
    "aten.pad.default",
    "aten.repeat_interleave.self_int",
    "aten.type_as.default",
)


def storage_id(tensor: Tensor) -> int:
    """Return an id of a strided tensor's storage, unique as long as it is alive; a view has its base's."""
    return int(tensor.untyped_storage()._cdata)  # not its address, which is 0 for fake tensors and empty ones


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes in place."""
    if node.op != "call_function":
        return []
    if callable(choose := getattr(node.target, "choose_written", None)):  # the user's own Python says it itself
        return list(choose(node.args[1]))
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = [value for info, value in _annotated_arguments(node) if info.is_write]
    # The schema does not mark the running statistics.
    if str(node.target) in ("aten.batch_norm.default", "aten.instance_norm.default") and node.args[5]:
        written += [value for value in node.args[3:5] if isinstance(value, fx.Node)]  # running mean and variance
    return written


def find_written_buffers(graph: fx.Graph) -> list[str]:
    """Return names of the buffers that a captured graph writes in place, by themselves or through a view."""
    root = alias_groups(graph)
    written = {root[argument] for node in graph.nodes for argument in written_arguments(node)}
    buffers = [node for node in graph.nodes if node.op == "placeholder" and node.meta["role"][0] == "buffer"]
    return [str(node.meta["role"][1]) for node in buffers if root[node] in written]


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node's value may share memory with."""
    target = unwrap_settings(node.target)
    if node.op != "call_function":
        return []
    if target is operator.getitem:
        return [a for a in node.args if isinstance(a, fx.Node)]
    if not isinstance(target, torch._ops.OpOverload):
        if not callable(getattr(target, "fake", None)):
            return []  # a symbolic size
        return list(node.all_input_nodes)  # the user's own Python may return views
    if str(target) in _SILENT_ALIASES:
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return [value for _, value in _annotated_arguments(node)]


def _annotated_arguments(node: fx.Node) -> Iterator[tuple[Any, fx.Node]]:
    """Yield the alias annotations of an operator's schema, each with the node that is given for the argument."""
    target: Any = unwrap_settings(node.target)
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, fx.Node):
                    yield argument.alias_info, item


def alias_groups(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for every node the first node whose memory its value may share (union-find)."""
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root.setdefault(node, node) is not node:
            node = root[node]
        return node

    for node in graph.nodes:
        find(node)
        for argument in aliased_arguments(node):
            # The sample slice is an argument of many nodes, but has no memory.
            if _is_part(argument):
                continue
            root[find(node)] = find(argument)
    return {node: find(node) for node in graph.nodes}


def _is_part(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta["role"][0] == "part")
