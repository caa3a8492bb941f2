"""Node descriptions: from executable code to plain nodes with names, shapes, work and the user's source lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph import flops as work
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.graph import Node
from polylane.graph.nodes.facts import op_name, unwrap_settings
from polylane.graph.nodes.names import module_of, name_without_number, source_of
from polylane.graph.nodes.user_lines import NotCaptured
from polylane.graph.symbolic_sizes import SymbolicSize, batch_dimension, is_dynamic, is_ragged

_NO_GRADIENT = (
    "aten.detach",
    "aten.zeros",
    "aten.ones",
    "aten.full",
    "aten.empty",
    "aten.new_",
    "aten.arange",
    "aten.rand",
)


def label_nodes(graph: fx.Graph) -> None:
    """Give every operator its user-facing name: module path, operator, and a number where that is not unique."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.meta.setdefault("op", op_name(node))
        target = unwrap_settings(node.target)
        node.meta["module"] = target.path if isinstance(target, LeafCall) else module_of(node)
        base = name_without_number(node)
        counts[base] += 1
        node.meta["name"] = base if counts[base] == 1 else f"{base}#{counts[base]}"


def refuse_unfit_operators(graph: fx.Graph) -> None:
    """Refuse a graph with operators that hold for the run of the export alone, or for one device alone.

    The former are steps of torch.func's (vmap, jvp, grad). The latter is as_strided: it reads memory by numbers, and a
    tensor that is gathered from other workers has other strides.

    Raises:
        NotCaptured: there is one; it names the module that has to be a leaf.
    """
    for node in graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            reason = "torch.func transforms a function inside, which no graph can hold"
        elif node.target in _BY_MEMORY:
            reason = "as_strided reads a tensor's memory as it lies on one device, where a plan lays it otherwise"
        else:
            continue
        path = module_of(node)
        raise NotCaptured("" if path == "loss" else path, source_of(node), reason)


_BY_MEMORY = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)


def find_gradient_flow(
    graph: fx.Graph, trainable: set[str], memory_groups: Sequence[Sequence[fx.Node]]
) -> dict[fx.Node, bool]:
    """Return for every node whether a gradient may flow back through its value: a superset of what autograd finds.

    It does where a parameter goes into the value and the loss depends on it. Nodes that write to the same memory
    (``memory_groups``) share the flow: a view that is written to changes its base.
    """
    fed = _find_fed_by_parameters(graph, trainable, memory_groups)
    read = _find_read_by_loss(graph, fed, memory_groups)
    return {node: flow and node in read for node, flow in fed.items()}


def _find_fed_by_parameters(
    graph: fx.Graph, trainable: set[str], memory_groups: Sequence[Sequence[fx.Node]]
) -> dict[fx.Node, bool]:
    """Return for every node whether its value depends on a trainable parameter by operators that have gradients."""
    group_of = {node: i for i, group in enumerate(memory_groups) for node in group}
    flowing: set[int] = set()
    # Fixed point: a gradient that enters one node of a group flows through all of it, and further from there.
    while True:
        flows: dict[fx.Node, bool] = {}
        for node in graph.nodes:
            flows[node] = _has_gradient(node, flows, trainable, group_of.get(node, -1) in flowing)
        reached_groups = {group_of[node] for node, flow in flows.items() if flow and node in group_of}
        if reached_groups <= flowing:
            return flows
        flowing |= reached_groups


def _find_read_by_loss(
    graph: fx.Graph, fed: Mapping[fx.Node, bool], memory_groups: Sequence[Sequence[fx.Node]]
) -> set[fx.Node]:
    """Return the nodes from whose values the loss is computed by operators that have gradients.

    What a dead branch computes is none of them: it stays in the graph where it writes a buffer, a BatchNorm's
    statistics for example, and its parameters have no gradient.
    """
    groups = {node: group for group in memory_groups for node in group}
    read_nodes = set[fx.Node]()
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in read_nodes or not fed[node]:
            continue
        read_nodes.add(node)
        waiting += [*node.all_input_nodes, *groups.get(node, ())]
    return read_nodes


def _has_gradient(node: fx.Node, flows: dict[fx.Node, bool], trainable: set[str], written: bool) -> bool:
    if node.op == "placeholder":
        kind, key = node.meta["role"]
        return kind == "parameter" and key in trainable
    floating = any(t.is_floating_point() or t.is_complex() for t in work.tensors_of(node.meta.get("val")))
    blocked = node.op == "call_function" and node.meta["op"].startswith(_NO_GRADIENT)
    return floating and (written or (not blocked and any(flows[n] for n in node.all_input_nodes)))


def recomputable_nodes(graph: fx.Graph, written: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that every stage can recompute: they depend on sizes, constants and unwritten buffers alone.

    So can a sparse tensor that is made of these and of the batch: it is not sent between stages, but its parts are in
    every stage's batch.
    """
    free, of_batch = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            role = node.meta["role"][0]
            if role in ("constant", "part") or (role == "buffer" and node not in written):
                free.add(node)
            elif role == "input":
                of_batch.add(node)
            continue
        if node.op != "call_function" or node in written or not _is_repeatable(unwrap_settings(node.target)):
            continue
        if all(n in free for n in node.all_input_nodes):
            free.add(node)
        elif all(n in free or n in of_batch for n in node.all_input_nodes):
            of_batch.add(node)
    stack = [node for node in of_batch if _is_sparse(node.meta.get("val"))]
    while stack:
        node = stack.pop()
        if node not in free and node.op == "call_function":
            free.add(node)
            stack += node.all_input_nodes
    return free


def _is_sparse(val: Any) -> bool:
    return isinstance(val, Tensor) and val.layout is not torch.strided


def _is_repeatable(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags
    is_internal = getattr(target, "__module__", "").startswith("polylane")
    return isinstance(target, SymbolicSize) or not is_internal  # operator.getitem, torch.sym_not and their like


def describe_nodes(graph: fx.Graph, flows: dict[fx.Node, bool], free: set[fx.Node]) -> tuple[Node, ...]:
    """Return the plain nodes of ``graph``, which :func:`label_nodes` has named."""
    return tuple(describe_node(n, flows[n], n in free) for n in graph.nodes if n.op == "call_function")


def describe_node(node: fx.Node, requires_grad: bool, free: bool) -> Node:
    """Return the plain node of a named operator; see :class:`~polylane.graph.graph.Node` for the arguments."""
    val = node.meta.get("val")
    reads = node.all_input_nodes
    roles = [n.meta["role"] for n in reads if n.op == "placeholder"]
    return Node(
        name=node.meta["name"],
        id=node.name,
        op=node.meta["op"],
        inputs=tuple(n.meta["name"] for n in reads if n.op == "call_function"),
        shape=work.shape_of(val),
        batch_dim=batch_dimension(val),
        dtype=work.DTYPE_NAMES.get(val.dtype, "") if isinstance(val, Tensor) else "",
        flops=work.flops_of(node, node.meta["op"]),
        bytes=work.bytes_of(val),
        parameters=tuple(role[1] for role in roles if role[0] == "parameter"),
        buffers=tuple(role[1] for role in roles if role[0] == "buffer"),
        module=node.meta["module"],
        source=source_of(node),
        requires_grad=requires_grad,
        recomputable=free,
        # A value whose size is known at run time only cannot be received into a buffer of planned size.
        can_cross_stages=isinstance(val, Tensor) and not is_ragged(val) and not _is_sparse(val),
        fixed_shape=tuple(-1 if is_dynamic(s) else int(s) for s in val.shape) if isinstance(val, Tensor) else (),
    )
