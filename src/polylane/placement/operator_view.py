"""Operators with concrete shapes: a symbolic graph at one number of samples, for the ranks of one mesh axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.errors import PolylaneError, format_plural
from polylane.graph.graph import Graph
from polylane.graph.interpreter import map_nested
from polylane.graph.nodes.facts import bind_arguments, operator_name
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.whole_batch_counts import WholeSize
from polylane.graph.symbolic_sizes import (
    ConcreteSizes,
    SymbolicSize,
    bind_symbols,
    is_data_dependent,
    open_size_function,
)
from polylane.graph.traced_sizes import TracedSize
from polylane.placement.placement import Cuts
from polylane.placement.strategy import OperatorCall, Place, TensorValue

# Operators that change only a tensor's shape, and the argument that gives the new shape.
_REFORMS = {"_unsafe_view": "size", "reshape": "shape", "view": "size"}


# A tensor of the graph: the name of its node (a placeholder or an operator), and its index among the node's tensors.
TensorKey = tuple[str, int]


@dataclass(frozen=True)
class OperatorNode:
    """One operator of the graph.

    Attributes:
        name: the node's name as users see it.
        module: path of the user's module that the operator belongs to.
        call: the operator's arguments and results with concrete shapes.
        input_keys: the tensor that each of the call's inputs is.
        is_pinned: True if it must run whole on every rank: it shares memory that is written in place, or is the user's
            own Python.
        flops: operations of the forward pass on the captured batch, of the whole operator.
    """

    name: str
    module: str
    call: OperatorCall
    input_keys: tuple[TensorKey, ...]
    is_pinned: bool
    flops: int

    @cached_property
    def output_keys(self) -> tuple[TensorKey, ...]:
        """The tensors that the operator returns."""
        return tuple((self.name, i) for i in range(len(self.call.outputs)))


@dataclass(frozen=True)
class GraphInput:
    """A placeholder of the graph: a parameter, a buffer, a constant or an input.

    Attributes:
        key: the tensor's key in the view.
        role: the kind ("parameter", "buffer", "input", ...) and its name or index.
        value: shape and dtype at the view's number of samples.
    """

    key: TensorKey
    role: tuple[str, Any]
    value: TensorValue


@dataclass(frozen=True)
class OperatorView:
    """All of a graph with concrete shapes.

    Attributes:
        graph: the captured graph that the view describes.
        samples: number of samples per worker that the shapes are for.
        sources: the graph's placeholders that are tensors, by key.
        operators: the graph's operators, in execution order.
        output_keys: the tensors that the graph returns: the loss, or its numerator and count.
        aliases: for nodes that only name one of an operator's several tensors: node name -> that tensor.
    """

    graph: Graph
    samples: int
    sources: Mapping[TensorKey, GraphInput]
    operators: tuple[OperatorNode, ...]
    output_keys: tuple[TensorKey, ...]
    aliases: Mapping[str, TensorKey] = field(default_factory=dict)


def node_name(node: fx.Node) -> str:
    """Return a node's name in a view: its user-facing name, or a placeholder's role."""
    if node.op == "placeholder":
        kind, key = node.meta["role"]
        return str(key) if kind == "value" else f"{kind}:{key}"
    return str(node.meta["name"])


def tensor_key(node: fx.Node) -> TensorKey:
    """Return the tensor that a node stands for; getitem of a node with several tensors is no operator of its own."""
    if node.op == "call_function" and node.target is operator.getitem and _gives_several(node.args[0]):
        return tensor_key(node.args[0])[0], int(node.args[1])  # type: ignore[arg-type]
    return node_name(node), 0


def graph_tensors(code: fx.Graph) -> Iterator[tuple[TensorKey, Tensor]]:
    """Yield every tensor of a graph's code with its key, as captured."""
    for node in code.nodes:
        val = node.meta.get("val")
        for number, value in enumerate(val if isinstance(val, (list, tuple)) else [val]):
            if isinstance(value, Tensor):
                name, index = tensor_key(node)
                yield (name, index + number), value


def _gives_several(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (list, tuple))


def is_alias(node: fx.Node) -> bool:
    """Return whether a node only names another's tensor, or is a number: nothing that an axis splits."""
    if node.op != "call_function":
        return False
    return (node.target is operator.getitem and _gives_several(node.args[0])) or isinstance(node.target, SymbolicSize)


class ViewSizes(ConcreteSizes):
    """Shapes and numbers of a graph at one number of samples.

    Args:
        samples: number of samples per worker that shapes are for.
        ragged: as in :class:`ConcreteSizes`, whether data-dependent sizes get a number.
        batch: number of samples of the whole batch; default: ``samples``.
        symbols: symbols of the graph's open sizes.
        open_sizes: their values; empty: those at which the graph was captured.
    """

    def __init__(
        self,
        samples: int,
        ragged: bool = False,
        batch: int | None = None,
        symbols: Sequence[Any] = (),
        open_sizes: tuple[int, ...] = (),
    ) -> None:
        traced = any(isinstance(size, TracedSize) for size in open_sizes)
        numbers = bind_symbols(symbols, open_sizes) if symbols and open_sizes and not traced else {}
        super().__init__(samples, ragged, numbers)
        self.batch, self.open_sizes = samples if batch is None else batch, open_sizes
        self._symbols = tuple(symbols) if traced else ()

    def __call__(self, size: Any) -> int:
        """Return a size as a number, or as a traced one where open sizes are traced."""
        if isinstance(size, int) or not self._symbols or is_data_dependent(size):
            return super().__call__(size)
        expression = size.node.expr
        if expression not in self._known:
            self._known[expression] = open_size_function(size, self._symbols)(self.samples, *self.open_sizes)
        return self._known[expression]

    def value_of(self, node: fx.Node) -> Any:
        """Return a node's value, a tensor or several without data, with symbols for the sizes that are looked at."""
        val = node.meta.get("val")
        return node.meta.get("open", val) if self.open_sizes else val

    def shape(self, val: Tensor) -> tuple[int, ...]:
        # Data-dependent sizes are those of the example unless ``ragged``; see ConcreteSizes.
        return tuple(self(size) for size in val.shape)

    def unknown_dims(self, val: Tensor) -> tuple[int, ...]:
        """Return the dimensions whose sizes are only the example's: they depend on data."""
        return () if self.ragged else tuple(i for i, n in enumerate(val.shape) if is_data_dependent(n))

    def number(self, node: fx.Node) -> Any:
        """Return the value of a node that is a size."""
        target: Any = node.target
        # Counts over the whole batch are the same on every replica; other sizes follow from the local samples.
        samples = self.batch if isinstance(target, WholeSize) else self.samples
        return target.at(samples, self.open_sizes or target.nominal)

    def data_dependent_number(self, node: fx.Node) -> Any:
        """Return the number that stands for a data-dependent size if ``ragged``; otherwise the node itself."""
        size = node.meta.get("val")
        return self(size) if self.ragged and isinstance(size, torch.SymInt) else node


def view_operators(
    graph: Graph,
    samples: int,
    degree: int,
    *,
    ragged: bool = False,
    batch: int | None = None,
    open_sizes: tuple[int, ...] = (),
) -> OperatorView:
    """Return ``graph`` at a number of samples, for an axis of ``degree`` ranks.

    Args:
        graph: the captured graph with symbolic sizes.
        samples: number of samples per worker.
        degree: number of ranks along the axis.
        ragged: let data-dependent sizes be as many rows as samples.
        batch: number of samples of the whole batch, where ``samples`` are a part of it.
        open_sizes: the sizes that the graph leaves open; empty: those at which it was captured.

    Raises:
        PolylaneError: the model has another number of samples written into it.
    """
    sizes, code = ViewSizes(samples, ragged, batch, graph.code.open_symbols, open_sizes), graph.code.fx
    described = {node.id: node for node in graph.nodes}
    sources, steps = dict[TensorKey, GraphInput](), list[OperatorNode]()
    # Nodes that share memory which some operator writes in place.
    pinned = {node.name for start, end in graph.unsplittable_ranges for node in graph.nodes[start : end + 1]}
    results: tuple[TensorKey, ...] = ()

    def flows(node: fx.Node) -> bool:
        if node.op != "placeholder":
            return described[node.name].requires_grad
        kind, key = node.meta["role"]
        return bool(kind == "parameter" and graph.parameters[key].trainable)

    for node in code.nodes:
        if node.op == "placeholder":
            val = sizes.value_of(node)
            if isinstance(val, Tensor):
                is_sparse = val.layout is not torch.strided
                value = TensorValue(sizes.shape(val), val.dtype, flows(node), 0, "out", is_sparse=is_sparse)
                sources[tensor_key(node)] = GraphInput(tensor_key(node), node.meta["role"], value)
        elif node.op == "output":
            results = tuple(tensor_key(n) for n in node.args[0])
        elif not is_alias(node):
            graph_node = described[node.name]
            call, reads = make_call(node, sizes, degree, flows)
            _require_samples(node, call, samples)
            # Only torch's own operators have rules: leaves and the user's functions run whole on every rank.
            fixed = graph_node.name in pinned or not call.op.startswith("aten.")
            steps.append(OperatorNode(graph_node.name, graph_node.module, call, reads, fixed, graph_node.flops))
    aliases = {
        str(n.meta["name"]): tensor_key(n) for n in code.nodes if is_alias(n) and not isinstance(n.target, SymbolicSize)
    }
    return OperatorView(graph, samples, sources, tuple(steps), results, aliases)


def _require_samples(node: fx.Node, call: OperatorCall, samples: int) -> None:
    """Check that an operator gives as many elements as it takes: a model may have a number of samples written into it.

    Raises:
        PolylaneError: an operator that only reshapes would give another number of elements.
    """
    form = call.arguments.get(_REFORMS.get(call.base, ""))
    vals = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    # A view to [-1, ...] adapts, and data-dependent sizes are not known before the step.
    if not isinstance(form, list) or -1 in form or any(free_unbacked_symbols(val) for val in vals if val is not None):
        return
    if math.prod(form) != math.prod(call.inputs[0].shape):
        raise PolylaneError(
            f"the model does not compute with {format_plural(samples, 'sample')} at a time: {node_name(node)} makes "
            f"{tuple(form)} of {call.inputs[0].shape}; is the number of samples written into it?"
        )


def make_call(
    node: fx.Node, sizes: ViewSizes, degree: int, has_gradient: Callable[[fx.Node], bool]
) -> tuple[OperatorCall, tuple[TensorKey, ...]]:
    """Return a node as a call, and the tensors that are its inputs."""
    prefix, arguments, _ = bind_arguments(node)
    inputs, reads, nodes = list[TensorValue](), list[TensorKey](), list[fx.Node]()

    # Walk nested arguments in the schema's order: the same order numbers the inputs again in rewrite.py.
    def settle(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(value.target, SymbolicSize):
                return sizes.number(value)
            val = sizes.value_of(value)
            if not isinstance(val, Tensor):
                return sizes.data_dependent_number(value)
            grad = has_gradient(value) and (val.is_floating_point() or val.is_complex())
            unknown = sizes.unknown_dims(val)
            is_sparse = val.layout is not torch.strided
            value_read = TensorValue(sizes.shape(val), val.dtype, grad, len(inputs), "in", unknown, is_sparse)
            inputs.append(value_read)
            reads.append(tensor_key(value))
            nodes.append(value)
            return inputs[-1]
        return value

    settled = map_nested(settle, arguments)
    val = sizes.value_of(node)
    vals = list(val) if isinstance(val, (list, tuple)) else [val]
    flows = has_gradient(node)
    outputs = tuple(
        TensorValue(
            sizes.shape(v),
            v.dtype,
            flows and (v.is_floating_point() or v.is_complex()),
            i,
            "out",
            sizes.unknown_dims(v),
            v.layout is not torch.strided,
        )
        for i, v in enumerate(vals)
        if isinstance(v, Tensor)
    )
    # The schema of batch_norm does not mark the running statistics as written.
    written = {id(w) for w in written_arguments(node)} | _running_statistics(node, arguments)
    call = OperatorCall(
        op=operator_name(node),
        arguments=settled,
        inputs=tuple(inputs),
        outputs=outputs,
        degree=degree,
        written_inputs=frozenset(i for i, n in enumerate(nodes) if id(n) in written),
        prefix=prefix,
    )
    return call, tuple(reads)


def _running_statistics(node: fx.Node, arguments: Mapping[str, Any]) -> set[int]:
    """Return the identities of the running statistics that a batch normalization in training mode writes."""
    if not operator_name(node).startswith("aten.batch_norm") or not arguments.get("training"):
        return set()
    return {id(arguments[k]) for k in ("running_mean", "running_var") if isinstance(arguments.get(k), fx.Node)}


def with_neighbour_cuts(call: OperatorCall, candidates: Mapping[Place, tuple[Cuts, ...]]) -> OperatorCall:
    """Return the call with the cuts that its neighbours may have."""
    return replace(call, neighbour_cuts=dict(candidates))
