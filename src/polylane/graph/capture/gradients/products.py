"""Vector-Jacobian products of single operators, traced to ATen as autograd computes them.

The operator's own value is not computed again: what autograd saved of it is the value in the graph. What an operator
computes on its way (the logarithms inside a cross-entropy) is part of its product.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import make_fx

from polylane.graph.capture.gradients.formulas import DECOMPOSED, find_formula, name_arguments
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.functionalize import functionalize_writes
from polylane.graph.quiet_tracing import quiet

_SYMBOLIC: Any = _config
# What autograd makes of a value that it saves, and gives back as the value itself.
_SAVED = ("aten.detach.default", "aten.alias.default")


# Their running statistics are written, of which their schemas say nothing.
NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")


class NoProduct(Exception):
    """An operator's vector-Jacobian product cannot be written into a graph; says why, as the end of a sentence."""


@dataclass(frozen=True)
class JacobianProduct:
    """A vector-Jacobian product that is wanted of a graph.

    Attributes:
        node: the operator that is differentiated.
        cotangents: the gradient of each of its outputs; None: there is none.
        wanted: the arguments to which gradients are passed on.
        differentiable: whether the product is to be differentiated itself.
    """

    node: fx.Node
    cotangents: Sequence[fx.Node | None]
    wanted: Sequence[fx.Node]
    differentiable: bool

    @property
    def given(self) -> list[fx.Node]:
        """The nodes that the product may read: the operator's arguments, then its cotangents."""
        arguments = (node for node in self.node.all_input_nodes if "val" in node.meta)  # the sample slice has none
        return list(dict.fromkeys([*arguments, *(c for c in self.cotangents if c is not None)]))


def insert_traced(graph: fx.Graph, constants: dict[str, Tensor], run: Any, node: fx.Node) -> list[fx.Node]:
    """Write what a function computes from a node's arguments in front of the node; return the results' nodes.

    Args:
        graph: captured code, changed in place.
        constants: tensors that the code closes over, by placeholder name; the function's own are added.
        run: takes the values of the node's arguments, and returns tensors.
        node: the operator in place of which the results are to stand.

    Raises:
        NoProduct: the function cannot be traced.
    """
    arguments = list(node.all_input_nodes)
    traced = _trace_function(run, [argument.meta["val"] for argument in arguments], True)
    _tidy(traced.graph)
    values = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), arguments, strict=True))
    results: Any = traced.graph.output_node().args[0]
    _copy_nodes(traced, results, values, (graph, constants, node, node), draws=True)
    return [values[result] for result in results]


def insert_product(
    graph: fx.Graph, constants: dict[str, Tensor], product: JacobianProduct, anchor: fx.Node
) -> list[fx.Node | None]:
    """Write a product into a graph; return its gradients, None where there is none.

    Args:
        graph: captured code, changed in place.
        constants: tensors that the code closes over, by placeholder name; the product's own are added.
        product: the product that is to be written.
        anchor: the node in front of which it is written; its line of the user's code is that of the product.

    Raises:
        NoProduct: the operator cannot be differentiated by operators of a graph.
    """
    traced = _trace(product)
    results: Any = traced.graph.output_node().args[0]
    count = len(product.cotangents)
    values = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), product.given, strict=True))
    for index, result in enumerate(results[:count]):
        if isinstance(result, fx.Node) and result not in values:
            values[result] = _output_of(product.node, index)
    _copy_nodes(traced, [r for r in results[count:] if r is not None], values, (graph, constants, product.node, anchor))
    return [None if result is None else values[result] for result in results[count:]]


def _output_of(node: fx.Node, index: int) -> fx.Node:
    """Return the node of an operator's output."""
    val = node.meta["val"]
    if not isinstance(val, (list, tuple)):
        return node
    output = next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)
    if output is None:
        with node.graph.inserting_after(node):
            output = node.graph.call_function(operator.getitem, (node, index))
        output.meta = {**node.meta, "val": val[index]}
    return output


def _copy_nodes(
    traced: fx.GraphModule,
    results: Sequence[fx.Node],
    values: dict[fx.Node, fx.Node],
    into: tuple[Any, Any, Any, Any],
    draws: bool = False,
) -> None:
    """Copy what the results need of a traced product; ``values`` has what is there, and gets what is copied.

    Args:
        traced: the graph of one traced product.
        results: the nodes of the gradients.
        values: nodes of the traced graph -> nodes of the captured one; filled.
        into: the captured graph, its constants, the differentiated operator, and the node to copy in front of.
        draws: whether random operators may be copied.
    """
    graph, constants, node, anchor = into
    needed, pending = set[fx.Node](), list(results)
    while pending:
        traced_node = pending.pop()
        if traced_node not in needed and traced_node not in values:
            needed.add(traced_node)
            pending += traced_node.all_input_nodes
    # The operators belong to the module whose value they differentiate, and to the line that asks for gradients.
    meta = {key: of.meta[key] for key, of in (("nn_module_stack", node), ("stack_trace", anchor)) if key in of.meta}
    for traced_node in traced.graph.nodes:
        if traced_node not in needed:
            continue
        if traced_node.op == "get_attr":
            values[traced_node] = _add_constant(graph, constants, getattr(traced, str(traced_node.target)))
            continue
        _check_copied(traced_node, draws)
        with graph.inserting_before(anchor):
            values[traced_node] = copied = graph.node_copy(traced_node, values.__getitem__)
        copied.meta = {**meta, "val": traced_node.meta.get("val")}


def _check_copied(node: fx.Node, draws: bool) -> None:
    """Raise NoProduct for an operator of a product that a graph cannot hold."""
    if not isinstance(node.target, torch._ops.OpOverload):
        if node.target is operator.getitem or not isinstance(node.meta.get("val"), Tensor):
            return
        raise NoProduct(f"computes {getattr(node.target, '__name__', node.target)} in its backward pass")
    if torch.Tag.nondeterministic_seeded in node.target.tags and not draws:
        raise NoProduct("draws random numbers inside")
    if written_arguments(node):
        raise NoProduct("writes in place in its backward pass")


def _add_constant(graph: fx.Graph, constants: dict[str, Tensor], value: Any) -> fx.Node:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        raise NoProduct("makes a tensor in its backward pass")
    name = next(name for i in range(len(constants) + 1) if (name := f"gradient_constant_{i}") not in constants)
    constants[name] = value
    with graph.inserting_before():
        placeholder = graph.placeholder(name)
    placeholder.meta = {"role": ("constant", name), "val": value}
    return placeholder


def _trace(product: JacobianProduct) -> fx.GraphModule:
    """Trace a product on the fake tensors of the capture: placeholders as ``given``, results the outputs, gradients."""
    traced = _trace_formula(product)
    if traced is None:
        traced = _trace_by(_differentiate, product, False)
    _tidy(traced.graph)
    return traced


def _trace_formula(product: JacobianProduct) -> fx.GraphModule | None:
    """Trace a product by a formula of :mod:`.formulas`; None where there is none for all that is wanted."""
    match = find_formula(product.node, product.wanted)
    if match is None:
        return None
    formula, names = match

    def run(product: JacobianProduct, table: Mapping[fx.Node, Any], cotangents: Sequence[Any]) -> list[Any]:
        named = fx.map_arg(name_arguments(product.node), table.__getitem__)
        gradients = [formula(named, cotangents[0], name) for name in names]
        if any(gradient is None for gradient in gradients):
            raise _NoFormula
        return [None, *gradients]

    try:
        return _trace_by(run, product, True)
    except _NoFormula:  # autograd differentiates the operator instead
        return None


class _NoFormula(Exception):
    """A formula does not hold for the shapes that are given."""


def _trace_by(differentiate: Any, product: JacobianProduct, verbatim: bool) -> fx.GraphModule:
    """Trace a function that computes a product.

    Args:
        differentiate: takes the product, its nodes' values, and the values of its cotangents; returns the operator's
            outputs (None: not computed), then the gradients.
        product: the product that is to be traced.
        verbatim: whether composite operators are kept as they are written.
    """

    def run(*values: Any) -> list[Any]:
        table = dict(zip(product.given, values, strict=True))
        cotangents = [None if cotangent is None else table[cotangent] for cotangent in product.cotangents]
        results: list[Any] = differentiate(product, table, cotangents)
        return results

    return _trace_function(run, [node.meta["val"] for node in product.given], verbatim)


def _trace_function(run: Any, values: Sequence[Any], verbatim: bool) -> fx.GraphModule:
    """Trace a function on fake tensors of a capture; ``verbatim``: composite operators are kept as they are written."""
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    decomposed: Any = {} if verbatim else get_decompositions(DECOMPOSED)
    with ExitStack() as stack:
        stack.enter_context(quiet())
        # Oblivious sizes, as in the export itself: a product must hold for one sample, too.
        stack.enter_context(_SYMBOLIC.patch(backed_size_oblivious=True))
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        try:
            return make_fx(run, decomposition_table=decomposed, pre_dispatch=verbatim)(*values)
        except (NoProduct, _NoFormula):
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise NoProduct(f"cannot be differentiated in a graph: {type(error).__name__}: {text}") from error


def _differentiate(
    product: JacobianProduct, table: Mapping[fx.Node, Any], cotangents: Sequence[Tensor | None]
) -> list[Any]:
    """Run an operator and autograd's formula for it; return its outputs, then the gradients."""
    node: Any = product.node
    leaves = {argument: table[argument].detach().requires_grad_() for argument in product.wanted}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: leaves.get(argument, table.get(argument)))
    with ExitStack() as stack:
        if "autocast" in node.meta:
            device, dtype, enabled, *_ = node.meta["autocast"]
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        target, args = _differentiable_form(node, args)
        result = target(*args, **kwargs)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    if not pairs:
        return [*outputs, *(None for _ in product.wanted)]
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [c for _, c in pairs],
        create_graph=product.differentiable, allow_unused=True,
    )  # fmt: skip
    return [*outputs, *gradients]


def _differentiable_form(node: fx.Node, args: Any) -> tuple[Any, Any]:
    """Return an operator and its arguments as they are differentiated: the value is the same.

    A normalization goes without the running statistics, which its own call moves already. Attention is written out:
    the backward passes of its fused kernels have no derivative.
    """
    name = str(node.target)
    if name in NORMS and args[5]:
        return node.target, (*args[:3], None, None, *args[5:])
    if name == "aten.scaled_dot_product_attention.default":
        return _write_out_attention, args
    return node.target, args


def _write_out_attention(*args: Any, **kwargs: Any) -> Tensor:
    value: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return value


def _tidy(graph: fx.Graph) -> None:
    """Leave out what autograd makes of the values that it saves, and turn writes in place into new values."""
    for index, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            node.meta["role"] = ("input", index)
    for node in list(graph.nodes):
        if str(node.target) in _SAVED:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    functionalize_writes(graph)
