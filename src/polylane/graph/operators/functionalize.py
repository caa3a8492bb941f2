"""Functionalization: in-place operators are replaced by ones that return a new value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.flops import shape_of, size_hint
from polylane.graph.nodes.facts import _UNFILLED, cast_value, find_operator, functional_name
from polylane.graph.nodes.memory import alias_groups, written_arguments

# They overwrite whatever was there: torch cuts the gradient only for the in-place version.
_DRAWING = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal_functional", "random", "uniform")
# torch lets gradients flow through these as if nothing had been written, unless they return their own type, bool.
_LOGICAL = ("logical_and", "logical_not", "logical_or", "logical_xor")
_MADE = (*_UNFILLED, "aten.zeros", "aten.ones", "aten.full", "aten.rand", "aten.new_")


def complete_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's positional arguments, with the defaults that its functional version requires explicitly."""
    target: Any = node.target
    twin, args = find_operator(functional_name(node)), list(node.args)
    if twin is None:
        return tuple(args)
    needed = sum(not a.kwarg_only and not a.has_default_value() for a in twin._schema.arguments)
    arguments = [a for a in target._schema.arguments if not a.kwarg_only and a.name not in node.kwargs]
    return (*args, *(a.default_value for a in arguments[len(args) : needed]))


def functionalize(node: fx.Node) -> list[fx.Node] | None:
    """Turn an in-place write into an operator that returns the same as a new value, gradients included.

    Returns:
        The nodes put before it; None if there is no such operator, and the node still writes in place.
    """
    # A write may move data between devices (copy_); a functional operator would not.
    vals = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if len({val.device for val in vals if isinstance(val, Tensor)}) > 1:
        return None
    if str(node.target) == "aten.copy_.default":
        return _functionalize_copy(node)
    twin = find_operator(functional_name(node))
    if twin is None or not _accepts_same_arguments(node.target, twin):
        return None
    args, name = complete_arguments(node), twin._schema.name.removeprefix("aten::")
    result, val = _try_without_data(twin, args, node.kwargs), node.meta.get("val")
    # An in-place write broadcasts its arguments to the written tensor; the new value must have that shape by itself.
    if result is None or not isinstance(val, Tensor) or tuple(result.shape) != shape_of(val):
        return None
    if result.dtype != val.dtype and name in _LOGICAL:
        return None
    new_nodes: list[fx.Node] = []
    if name in _DRAWING:
        args = tuple(_without_gradient(node, a, new_nodes) for a in args)
    if result.dtype == val.dtype:
        node.target, node.args = twin, args
        return new_nodes
    # An in-place write keeps the written tensor's dtype: cast the promoted result back.
    new_nodes.append(_insert_before(node, twin, args, cast_value(val, result.dtype), node.kwargs))
    node.target, node.args, node.kwargs = torch.ops.aten.to.dtype, (new_nodes[-1], val.dtype), {}
    return new_nodes


def relax_views(graph: fx.Graph, shared: Collection[fx.Node]) -> None:
    """Let every view copy where it must: which strides a value has is another matter on ranks that split operators.

    A convolution may give its channels last, so that ``x.permute(0, 2, 3, 1).contiguous()`` does nothing under export,
    and the view after it holds only there. The operators keep their names.

    Args:
        graph: captured code, changed in place.
        shared: nodes that share memory which some node writes: these stay views.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.view.default and node not in shared:
            node.meta.setdefault("op", str(node.target))
            node.target = torch.ops.aten.reshape.default


def _accepts_same_arguments(operator: Any, twin: Any) -> bool:
    """Return whether two operators take a tensor, and then the same arguments in the same order."""
    a, b = ([x for x in op._schema.arguments if not x.kwarg_only] for op in (operator, twin))
    if twin is torch.ops.aten.zeros_like.default:
        return True
    has_equal_types = len(a) == len(b) and all(str(x.type) == str(y.type) for x, y in zip(a, b, strict=True))
    return has_equal_types and str(a[0].type) == "Tensor"


def _try_without_data(operator: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return what an operator gives for the example's sizes, without data; None where torch cannot tell."""

    def example(node: fx.Node) -> Any:
        val = node.meta["val"]
        if isinstance(val, Tensor):
            return _example(val)
        return val if isinstance(val, (bool, float)) else size_hint(val)

    try:
        with torch.no_grad():
            result = operator(*fx.map_arg(args, example), **fx.map_arg(kwargs, example))
    except Exception:  # it needs the data, or refuses these arguments: the write in place is kept
        return None
    return result if isinstance(result, Tensor) else None


def _functionalize_copy(node: fx.Node) -> list[fx.Node] | None:
    """Replace ``written.copy_(source)`` by the source in the dtype, shape and memory order of what is written."""
    written: Any = node.args[0]
    source: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("src")
    to, of = written.meta.get("val"), source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(to, Tensor) or not isinstance(of, Tensor):
        return None
    new_nodes: list[fx.Node] = []
    if of.dtype != to.dtype:
        of = cast_value(of, to.dtype)
        new_nodes.append(_insert_before(node, torch.ops.aten.to.dtype, (source, to.dtype), of))
        source = new_nodes[-1]
    if [str(n) for n in of.shape] != [str(n) for n in to.shape]:
        new_nodes.append(_insert_before(node, torch.ops.aten.expand_as.default, (source, written), to))
        source = new_nodes[-1]
    # clone keeps the source's strides: ask for a contiguous copy where the written tensor was one.
    expanded = source.target is torch.ops.aten.expand_as.default
    ordered = _example(to).is_contiguous() and (expanded or not _example(of).is_contiguous())
    node.target, node.args = torch.ops.aten.clone.default, (source,)
    node.kwargs = {"memory_format": torch.contiguous_format} if ordered else {}
    return new_nodes


def _example(val: Tensor) -> Tensor:
    """Return a tensor of the example's sizes, without data: asking one with symbolic sizes would fix them."""
    return torch.empty_strided(shape_of(val), [size_hint(n) for n in val.stride()], dtype=val.dtype, device="meta")


def _without_gradient(node: fx.Node, value: Any, new_nodes: list[fx.Node]) -> Any:
    val = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(val, Tensor) or str(value.target).startswith(_MADE):
        return value
    new_nodes.append(_insert_before(node, torch.ops.aten.detach.default, (value,), val))
    return new_nodes[-1]


def _insert_before(node: fx.Node, target: Any, args: Any, val: Tensor, kwargs: Any = None) -> fx.Node:
    """Insert a node in front of another, with the same source line."""
    with node.graph.inserting_before(node):
        new_node = node.graph.call_function(target, tuple(args), dict(kwargs or {}))
    new_node.meta = {**node.meta, "val": val}
    return new_node


def _members_of(groups: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes of each group that :func:`alias_groups` found, by its first node."""
    members = defaultdict[fx.Node, list[fx.Node]](list)
    for node, root in groups.items():
        members[root].append(node)
    return members


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
