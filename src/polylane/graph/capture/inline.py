"""Inlining: from an exported program to flat code, without nested regions, checks and placeholder operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.capture.python.packed_sequences import RecurrentSite
from polylane.graph.capture.python.python_operators import SITES, call_of_site
from polylane.graph.nodes.facts import functional_name, op_name
from polylane.graph.nodes.memory import written_arguments

_ASSERTIONS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range", "aten._assert_async")


def copy_with_roles(program: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return a flat copy of a program's graph whose placeholders have roles, and its lifted constants.

    Regions under ``no_grad`` or ``autocast`` are inlined: results of the former are detached, operators of the latter
    record the setting in their meta.
    """
    graph, constants, values = fx.Graph(), dict[str, Tensor](), dict[fx.Node, Any]()
    kinds = torch.export.graph_signature.InputKind
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    leaf = 0
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            values[node] = copied = graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            if spec.kind is kinds.USER_INPUT:
                copied.meta["role"], leaf = ("input", leaf), leaf + 1
            elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
                copied.meta["role"] = (spec.kind.name.lower(), str(spec.target).removeprefix("model."))
            else:
                copied.meta["role"] = ("constant", node.name)
                constants[node.name] = program.constants[str(spec.target)]
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], values.__getitem__))
        else:
            _copy_node(node, graph, values, program.graph_module, {})
    return graph, constants


def _copy_node(
    node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any], owner: fx.GraphModule, extra: dict[str, Any]
) -> None:
    if node.op == "get_attr":
        values[node] = getattr(owner, str(node.target))
        return
    if node.target is operator.getitem and isinstance(values.get(node.args[0]), (tuple, list)):  # type: ignore[arg-type]
        values[node] = values[node.args[0]][node.args[1]]  # type: ignore[index]
        return
    name = str(node.target)
    if "wrap_with_set_grad_enabled" in name or "wrap_with_autocast" in name:
        values[node] = _inline(node, graph, values, extra)
        return
    copied = graph.node_copy(node, lambda n: values[n])
    # Taking one of an operator's results runs nothing that a setting could change: the rules know it by its plain name.
    copied.meta = dict(node.meta) if node.target is operator.getitem else {**node.meta, **extra}
    copied = _write_by_copy(graph, copied)
    if name.startswith("aten.randint_like"):  # torch marks it differentiable, but has no derivative for it
        with graph.inserting_before(copied):
            copied.args = (_detached(graph, copied.args[0]), *copied.args[1:])  # type: ignore[arg-type]
    values[node] = copied


def _write_by_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Replace an operator that writes into ``out=`` by the plain one and a copy, and return the copy.

    Autograd refuses the former, even where the user's code ran it without gradients.
    """
    into, target = node.kwargs.get("out"), node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(into, fx.Node):
        return node
    packet, names = target.overloadpacket, [a.name for a in target._schema.arguments if a.name != "out"]
    overloads = (getattr(packet, name) for name in packet.overloads())
    plain = next((overload for overload in overloads if [a.name for a in overload._schema.arguments] == names), None)
    if plain is None:
        return node
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    with graph.inserting_before(node):
        value = graph.call_function(plain, node.args, kwargs)
        written = graph.call_function(torch.ops.aten.copy_.default, (into, value))
    value.meta, written.meta = dict(node.meta), dict(node.meta)
    graph.erase_node(node)
    return written


def _inline(node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any], extra: dict[str, Any]) -> Any:
    args = [values.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
    at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
    region: Any = args[at]
    inputs = iter(args[at + 1 :])
    if "autocast" in str(node.target):
        extra = {**extra, "autocast": tuple(args[:at])}  # device type, dtype, enabled, cache
    inner: dict[fx.Node, Any] = {}
    old_nodes = set(graph.nodes)
    result: Any = None
    for inner_node in region.graph.nodes:
        if inner_node.op == "placeholder":
            inner[inner_node] = next(inputs)
        elif inner_node.op == "output":
            result = fx.map_arg(inner_node.args[0], inner.__getitem__)
        else:
            _copy_node(inner_node, graph, inner, region, extra)
    # The region ran without gradients: detach what leaves it, and what it writes in place.
    if "set_grad_enabled" in str(node.target) and not args[0]:
        new_nodes = {n: None for n in graph.nodes if n not in old_nodes}
        for inner_node in new_nodes:
            _write_without_gradient(graph, inner_node)
        result = fx.map_arg(result, lambda n: _detached(graph, n) if n in new_nodes else n)
    return result


def _write_without_gradient(graph: fx.Graph, node: fx.Node) -> None:
    """Detach what a no_grad region writes in place: the memory outlives it, a buffer even the step."""
    if not functional_name(node):
        return
    written = set(written_arguments(node))
    with graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: n if n in written else _detached(graph, n)
        )


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    val = value.meta.get("val")
    if not isinstance(val, Tensor) or not val.is_floating_point():
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def add_slice_input(graph: fx.Graph) -> fx.Node:
    """Add the first placeholder of every graph, the sample slice, and return it."""
    with graph.inserting_before():  # before all others
        part = graph.placeholder("part")
    part.meta["role"] = ("part", 0)
    return part


def drop_assertions(graph: fx.Graph) -> None:
    """Erase export's own checks of dtypes and sizes, which the self-check has replaced."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and str(node.target).startswith(_ASSERTIONS) and not node.users:
            graph.erase_node(node)


def inline_sites(graph: fx.Graph, part: fx.Node) -> None:
    """Replace placeholder operators by the callables that they stand for."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) in SITES:
            number, tensors = node.args
            site = call_of_site(number)
            if isinstance(site, RecurrentSite):
                site.write_operator(node, part, tensors)
            else:
                node.target, node.args = site, (part, tensors)
            if node.meta.get("val") is None:  # a check, which gives nothing
                node.meta["val"] = []


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads and that write nothing that lasts."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _lasts(node):
            graph.erase_node(node)


def _lasts(node: fx.Node) -> bool:
    """Return whether a node does something that does not need a reader: it writes, or may raise."""
    return bool(written_arguments(node)) or op_name(node) in ("leaf", "check")


def merge_tied(graph: fx.Graph, tied: dict[str, str]) -> None:
    """Give all names of a tied weight one placeholder."""
    placeholders: dict[tuple[str, Any], fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        kind, key = node.meta["role"]
        node.meta["role"] = role = (kind, tied.get(key, key) if isinstance(key, str) else key)
        if role in placeholders:
            node.replace_all_uses_with(placeholders[role])
            graph.erase_node(node)
        else:
            placeholders[role] = node
