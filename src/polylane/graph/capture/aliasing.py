"""Alias analysis: in-place writes become new values where nothing else reads the memory; others keep one stage."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from polylane.graph.capture.functionalize import functional_name, functionalize
from polylane.graph.capture.leaves import LeafCall

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


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes in place."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, LeafCall):  # assume that a leaf writes all its buffers
        offset = len(node.target.parameters)
        tensors: Any = node.args[1]
        return list(tensors[offset : offset + len(node.target.buffers)])
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


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node's value may share memory with."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return [a for a in node.args if isinstance(a, fx.Node)]
    if not isinstance(node.target, torch._ops.OpOverload):
        if not callable(getattr(node.target, "fake", None)):
            return []  # a symbolic size
        return list(node.all_input_nodes)  # the user's own Python may return views
    if str(node.target) in _SILENT_ALIASES:
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return [value for _, value in _annotated_arguments(node)]


def _annotated_arguments(node: fx.Node) -> Iterator[tuple[Any, fx.Node]]:
    """Yield the alias annotations of an operator's schema, each with the node that is given for the argument."""
    target: Any = node.target
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
        for argument in _aliased_arguments(node):
            # The sample slice is an argument of many nodes, but has no memory.
            if _is_part(argument):
                continue
            root[find(node)] = find(argument)
    return {node: find(node) for node in graph.nodes}


def _members_of(groups: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes of each group that :func:`alias_groups` found, by its first node."""
    members = defaultdict[fx.Node, list[fx.Node]](list)
    for node, root in groups.items():
        members[root].append(node)
    return members


def _is_part(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta["role"][0] == "part")


def functionalize_writes(graph: fx.Graph) -> list[list[fx.Node]]:
    """Replace in-place writes by functional operators where nothing else reads the memory.

    Returns:
        Groups of nodes that share memory which is still written: each group must stay on one stage.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups = alias_groups(graph)
    members = _members_of(groups)
    for node in list(graph.nodes):
        if not functional_name(node) or len(written_arguments(node)) != 1:
            continue
        (written,) = written_arguments(node)
        root = groups[written]
        # Safe if no other alias of the memory is read after the write, and the memory is not a parameter, buffer or
        # input.
        aliases = (n for n in members[root] if order[n] < order[node] and n is not written)
        if root.op == "placeholder" or any(order[user] > order[node] for n in aliases for user in n.users):
            continue
        new_nodes = functionalize(node)
        if new_nodes is not None:
            # New nodes are at the write's place in the order; only later readers see the new value.
            order |= dict.fromkeys(new_nodes, order[node])
            written.replace_all_uses_with(node, delete_user_cb=_later_than(order, node))
    return _written_groups(graph)


def _later_than(order: dict[fx.Node, int], node: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda user: order[user] > order[node]


def _written_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    groups = alias_groups(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    members, written = _members_of(groups), defaultdict[fx.Node, list[fx.Node]](list)
    for node in graph.nodes:
        for value in written_arguments(node):
            written[groups[value]].append(node)
    memory_groups = []
    for root, writers in written.items():
        if root.op == "placeholder":  # a buffer: all that touches it runs on the stage that holds it
            touching = {m for m in members[root] if m.op != "placeholder"}
            touching |= {user for m in members[root] for user in m.users}
            memory_groups.append(sorted((n for n in touching if n.op != "output"), key=order.__getitem__))
            continue
        # From where the memory begins to its last write; what comes later only reads.
        last_write = max(order[w] for w in writers)
        nodes = {n for n in members[root] if order[n] <= last_write} | set(writers)
        memory_groups.append(sorted(nodes, key=order.__getitem__))
    return memory_groups
