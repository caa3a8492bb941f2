"""From an exported program to flat code that may be cut anywhere: inline, write values not places, key what is random."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.graph import random as keyed
from polylane.graph.opaque import site_of

_ASSERTIONS = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range", "aten._assert_async")
_TWINS = {"aten.normal_.default": "normal_functional"}
# These may hand back their argument itself, without saying so in their schema.
_SILENT_ALIASES = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")


def op_name(node: fx.Node) -> str:
    """ "aten.linear.default" for an operator, the callable's own name otherwise."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def copy_with_roles(program: torch.export.ExportedProgram) -> tuple[fx.Graph, dict[str, Tensor]]:
    """A flat copy of a program's graph whose placeholders know what they stand for, and its lifted constants.

    Regions under ``no_grad`` or ``autocast`` are inlined: the results of the former are detached, the operators of the
    latter remember the setting.
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


def _copy_node(node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any], owner: fx.GraphModule, extra: dict[str, Any]) -> None:
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
    copied.meta = {**node.meta, **extra}
    values[node] = copied


def _inline(node: fx.Node, graph: fx.Graph, values: dict[fx.Node, Any], extra: dict[str, Any]) -> Any:
    args = [values.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
    at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
    region, inputs = args[at], iter(args[at + 1 :])
    if "autocast" in str(node.target):
        extra = {**extra, "autocast": tuple(args[:at])}  # device type, dtype, enabled, cache
    inner: dict[fx.Node, Any] = {}
    result: Any = None
    for each in region.graph.nodes:
        if each.op == "placeholder":
            inner[each] = next(inputs)
        elif each.op == "output":
            result = fx.map_arg(each.args[0], inner.__getitem__)
        else:
            _copy_node(each, graph, inner, region, extra)
    if "set_grad_enabled" in str(node.target) and not args[0]:
        result = fx.map_arg(result, lambda n: _detached(graph, n))
    return result


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    val = value.meta.get("val")
    if not isinstance(val, Tensor) or not val.is_floating_point():
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def drop_assertions(graph: fx.Graph) -> None:
    """Capture's own checks of dtypes and sizes: they were made, and the self-check stands for them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and str(node.target).startswith(_ASSERTIONS) and not node.users:
            graph.erase_node(node)


def _writes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [value] if isinstance(value, fx.Node) else []
    if str(node.target) in ("aten.batch_norm.default", "aten.instance_norm.default") and node.args[5]:
        written += [value for value in node.args[3:5] if isinstance(value, fx.Node)]  # running mean and variance
    return written


def _aliases(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node's value may share memory with."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return [a for a in node.args if isinstance(a, fx.Node)]
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.all_input_nodes)  # the user's own Python may return views
    if str(node.target) in _SILENT_ALIASES:
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    shared = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            shared += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return shared


def alias_groups(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the first node whose memory its value may share."""
    root: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while root.setdefault(node, node) is not node:
            node = root[node]
        return node

    for node in graph.nodes:
        find(node)
        for other in _aliases(node):
            root[find(node)] = find(other)
    return {node: find(node) for node in graph.nodes}


def values_not_places(graph: fx.Graph) -> list[list[fx.Node]]:
    """Turn writes in place into their functional twins where nothing else sees the memory.

    Returns:
        The groups of nodes that share memory somebody still writes: each must stay whole on one stage.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    groups = alias_groups(graph)
    for node in list(graph.nodes):
        for written in _writes(node):
            members = [n for n in order if groups.get(n) is groups[written] and n is not node]
            # Alone: the written value itself, its earlier twins, and nobody's placeholder.
            seen_again = any(order[user] > order[node] for n in members if n is not written for user in n.users)
            if groups[written].op != "placeholder" and not seen_again and (twin := _twin(node)) is not None:
                written.replace_all_uses_with(node, delete_user_cb=lambda u, at=order[node]: order.get(u, -1) > at)
                node.target = twin
    return _written_groups(graph)


def _twin(node: fx.Node) -> Any:
    target: Any = node.target
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not str(target).startswith("aten.") or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, _TWINS.get(str(target), name[:-1]), None)
    return getattr(packet, overload, None) if packet is not None else None


def _written_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    groups = alias_groups(graph)
    written = {groups[value] for node in graph.nodes for value in _writes(node)}
    together = []
    for first in written:
        members = [n for n in graph.nodes if groups[n] is first]
        touching = {m for m in members if m.op != "placeholder"} | {u for m in members for u in m.users}
        writers = [n for n in touching if any(groups[v] is first for v in _writes(n))]
        if first.op == "placeholder":  # a buffer: it lives where it is used
            together.append([n for n in graph.nodes if n in touching and n.op != "output"])
            continue
        # From where the memory begins to its last write; what comes later only reads.
        order = {node: i for i, node in enumerate(graph.nodes)}
        last = max(order[w] for w in writers)
        together.append([n for n in members if order[n] <= last] + writers)
    return together


def drop_dead(graph: fx.Graph) -> None:
    """Erase what nothing reads and what writes nothing that lasts."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _writes(node) and op_name(node) != "leaf":
            graph.erase_node(node)


def size_function(expression: Any) -> Callable[[int], int]:
    """A size of the graph (a sympy expression of the batch's symbols) as a function of the number of samples."""
    if isinstance(expression, int):
        return lambda samples: expression
    node = getattr(expression, "node", None)
    expr = sympy.sympify(node.expr if node is not None else expression)
    if expr.is_number:
        fixed = int(expr)
        return lambda samples: fixed
    if free_unbacked_symbols(expr):
        raise ValueError(f"{expr} is known at run time only")
    samples = sympy.Symbol("samples", integer=True)
    single = expr.subs(dict.fromkeys(expr.free_symbols, samples))
    if single == samples:
        return lambda n: n
    function = sympy.lambdify([samples], single, modules=[{"FloorDiv": operator.floordiv, "Mod": operator.mod}, "math"])
    return lambda n: int(function(n))


class Size:
    """A size as a node of the graph: reads the number of samples off the part in hand."""

    __name__ = "size"
    __module__ = "polylane"

    def __init__(self, of: Callable[[int], int], like: Any) -> None:
        self.of = of
        self.convert = bool if isinstance(like, (bool, torch.SymBool)) else float if isinstance(like, (float, torch.SymFloat)) else int

    def __call__(self, part: Any) -> Any:
        return self.convert(self.of(part.samples))


def free_the_sizes(graph: fx.Graph, part: fx.Node) -> None:
    """Let sizes that follow from the batch's be computed from the part in hand, so that no cut has to carry them."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            continue
        try:
            of = size_function(val)
        except ValueError:
            continue
        node.target, node.args, node.kwargs = Size(of, val), (part,), {}


def key_the_random(graph: fx.Graph, part: fx.Node, name: Callable[[fx.Node], str]) -> bool:
    """Replace random operators by those with a key. Returns whether there was any.

    ``name`` gives the node's own name: the same in every plan, so that the numbers are the same too.
    """
    found = False
    for node in list(graph.nodes):
        function = keyed.KEYED.get(op_name(node)) if node.op == "call_function" else None
        if function is None or not _is_random(node):
            continue
        found = True
        val = node.meta["val"] if function is not keyed.attention else node.args[0].meta["val"]
        node.target, node.args = function, (part, keyed.salt_of(name(node)), batch_dimension(val), *node.args)
    return found


def _is_random(node: fx.Node) -> bool:
    if op_name(node) == "aten.scaled_dot_product_attention.default":
        return bool((node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) or False)
    if op_name(node).startswith(("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout")):
        return bool(node.args[2]) and bool(node.args[1])
    return True


def batch_dimension(val: Any) -> int | None:
    """The first dimension that grows with the samples."""
    if not isinstance(val, Tensor):
        return None
    return next((i for i, size in enumerate(val.shape) if isinstance(size, torch.SymInt) and not size.node.expr.is_number), None)


def open_the_sites(graph: fx.Graph, part: fx.Node) -> None:
    """Let opaque operators be the callables they stand for."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == "polylane.opaque.default":
            number, tensors = node.args
            node.target, node.args = site_of(number), (part, tensors)


class InAutocast:
    """An operator of a region that the user put under (or out of) autocast."""

    __module__ = "polylane"

    def __init__(self, target: Any, setting: Iterable[Any]) -> None:
        self.target = target
        self.device_type, self.dtype, self.enabled, self.cache = setting
        self.__name__ = str(getattr(target, "__name__", target)).replace(".", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache):
            return self.target(*args, **kwargs)


def wrap_autocast(graph: fx.Graph) -> None:
    """Give operators captured under autocast their setting back."""
    for node in graph.nodes:
        if node.op == "call_function" and "autocast" in node.meta and isinstance(node.target, torch._ops.OpOverload):
            node.meta["op"] = op_name(node)
            node.target = InAutocast(node.target, node.meta["autocast"])


_LOWER = (torch.float16, torch.bfloat16, torch.float32)


def promote(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Let casts to a lower floating type keep float64, so that a proof in float64 is one throughout."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = _promoted(node.args)
            node.kwargs = _promoted(node.kwargs)
            node.meta.pop("autocast", None)
    for name, value in constants.items():
        if value.dtype in _LOWER:
            constants[name] = value.double()


def _promoted(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOWER else value
    if isinstance(value, (list, tuple)):
        return type(value)(_promoted(v) for v in value)
    if isinstance(value, dict):
        return {k: _promoted(v) for k, v in value.items()}
    return value
