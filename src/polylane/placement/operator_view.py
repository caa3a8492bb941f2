"""A graph's operators as calls with concrete shapes, for one number of samples and the ranks of one axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.errors import PolylaneError
from polylane.graph.capture.aliasing import written_arguments
from polylane.graph.capture.inline import op_name
from polylane.graph.graph import Graph
from polylane.graph.operators.whole_batch_counts import WholeSize
from polylane.graph.precision import unwrap_settings
from polylane.graph.symbolic_sizes import ConcreteSizes, SymbolicSize
from polylane.placement.placement import Cuts
from polylane.placement.strategy import OperatorCall, Place, TensorValue

# Operators that give all that they take in another form, and the argument that says in which.
_REFORMS = {"_unsafe_view": "size", "reshape": "shape", "view": "size"}

# Of torch's numbers of dtypes (c10/core/ScalarType.h) the one that is a default: whole numbers of 64 bits.
_DTYPES = {4: torch.int64}

# A tensor of the graph: the name of its node (a placeholder or an operator) and which of the tensors that it gives.
TensorKey = tuple[str, int]


@dataclass(frozen=True)
class OperatorNode:
    """One operator of the graph.

    Attributes:
        name: of its node, as users see it.
        module: the user's module path.
        call: what it computes.
        input_keys: where each of the call's inputs comes from.
        is_pinned: it must run whole on every rank: it shares memory that is written in place, or is the user's own
            Python.
        flops: of the forward pass, whole.
    """

    name: str
    module: str
    call: OperatorCall
    input_keys: tuple[TensorKey, ...]
    is_pinned: bool
    flops: int

    @cached_property
    def output_keys(self) -> tuple[TensorKey, ...]:
        """The tensors that it gives."""
        return tuple((self.name, i) for i in range(len(self.call.outputs)))


@dataclass(frozen=True)
class GraphInput:
    """A placeholder: a parameter, a buffer, a constant or an input."""

    key: TensorKey
    role: tuple[str, Any]
    value: TensorValue


@dataclass(frozen=True)
class OperatorView:
    """All of a graph, concrete.

    Attributes:
        graph: what it shows.
        samples: in hand.
        sources: by key.
        operators: in order.
        output_keys: what gives the loss.
        aliases: nodes that only name one of several tensors that an operator gives -> that tensor.
    """

    graph: Graph
    samples: int
    sources: Mapping[TensorKey, GraphInput]
    operators: tuple[OperatorNode, ...]
    output_keys: tuple[TensorKey, ...]
    aliases: Mapping[str, TensorKey] = field(default_factory=dict)


def node_name(node: fx.Node) -> str:
    """What a node is called in a view: its user-facing name, or a placeholder's role."""
    if node.op == "placeholder":
        kind, key = node.meta["role"]
        return str(key) if kind == "value" else f"{kind}:{key}"
    return str(node.meta["name"])


def tensor_key(node: fx.Node) -> TensorKey:
    """The tensor that a node stands for; taking one of several is no operator."""
    if node.op == "call_function" and node.target is operator.getitem and _gives_several(node.args[0]):
        return tensor_key(node.args[0])[0], int(node.args[1])  # type: ignore[arg-type]
    return node_name(node), 0


def _gives_several(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (list, tuple))


def is_alias(node: fx.Node) -> bool:
    """Whether a node only names what another gives, or is a number: nothing that an axis splits."""
    if node.op != "call_function":
        return False
    return (node.target is operator.getitem and _gives_several(node.args[0])) or isinstance(node.target, SymbolicSize)


class ViewSizes(ConcreteSizes):
    """Shapes and numbers of a graph at one number of samples.

    Args:
        samples, ragged: as in :class:`ConcreteSizes`.
        batch: samples of the whole batch; default: those in hand.
    """

    def __init__(self, samples: int, ragged: bool = False, batch: int | None = None) -> None:
        super().__init__(samples, ragged)
        self.batch = samples if batch is None else batch

    def shape(self, val: Tensor) -> tuple[int, ...]:
        return tuple(self(size) for size in val.shape)

    def number(self, node: fx.Node) -> Any:
        """What a node that is a size amounts to."""
        target: Any = node.target
        return target.convert(target.of(self.batch if isinstance(target, WholeSize) else self.samples))

    def data_dependent_number(self, node: fx.Node) -> Any:
        """A number that depends on data: how many rows it stands for, if that is asked for; else the node itself."""
        size = node.meta.get("val")
        return self(size) if self.ragged and isinstance(size, torch.SymInt) else node


def view_operators(
    graph: Graph, samples: int, degree: int, *, ragged: bool = False, batch: int | None = None
) -> OperatorView:
    """``graph`` at so many samples, for an axis of ``degree`` ranks.

    Args:
        ragged: let sizes that depend on data be as many rows as samples.
        batch: samples of the whole batch, where these are a part of it.
    """
    sizes, code = ViewSizes(samples, ragged, batch), graph.code.fx
    described = {node.id: node for node in graph.nodes}
    sources, steps = dict[TensorKey, GraphInput](), list[OperatorNode]()
    pinned = _pinned_nodes(graph)
    results: tuple[TensorKey, ...] = ()

    def flows(node: fx.Node) -> bool:
        if node.op != "placeholder":
            return described[node.name].requires_grad
        kind, key = node.meta["role"]
        return bool(kind == "parameter" and graph.parameters[key].trainable)

    for node in code.nodes:
        if node.op == "placeholder":
            val = node.meta.get("val")
            if isinstance(val, Tensor):
                value = TensorValue(sizes.shape(val), val.dtype, flows(node), 0, "out")
                sources[tensor_key(node)] = GraphInput(tensor_key(node), node.meta["role"], value)
        elif node.op == "output":
            results = tuple(tensor_key(n) for n in node.args[0])
        elif not is_alias(node):
            own = described[node.name]
            call, reads = make_call(node, sizes, degree, flows)
            _require_samples(node, call, samples)
            fixed = own.name in pinned or not call.op.startswith("aten.")
            steps.append(OperatorNode(own.name, own.module, call, reads, fixed, own.flops))
    aliases = {
        str(n.meta["name"]): tensor_key(n) for n in code.nodes if is_alias(n) and not isinstance(n.target, SymbolicSize)
    }
    return OperatorView(graph, samples, sources, tuple(steps), results, aliases)


def _require_samples(node: fx.Node, call: OperatorCall, samples: int) -> None:
    """A model with a number of samples written into it fails with another; let no split of it seem to work.

    Raises:
        PolylaneError: an operator would give more, or fewer, elements than it takes.
    """
    form = call.arguments.get(_REFORMS.get(call.base, ""))
    vals = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    if not isinstance(form, list) or -1 in form or any(free_unbacked_symbols(val) for val in vals if val is not None):
        return
    if math.prod(form) != math.prod(call.inputs[0].shape):
        raise PolylaneError(
            f"the model does not compute with {samples} samples at a time: {node_name(node)} makes {tuple(form)} of "
            f"{call.inputs[0].shape}; is the number of samples written into it?"
        )


def _pinned_nodes(graph: Graph) -> set[str]:
    """Nodes that share memory that somebody writes in place."""
    return {node.name for first, last in graph.unsplittable_ranges for node in graph.nodes[first : last + 1]}


def bind_arguments(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, dict[str, Any], list[str]]:
    """A node's arguments by the name in torch's schema.

    Returns:
        How many leading arguments are none of torch's, all others by name, and which of them are positional.
    """
    schema = _schema(operator_name(node))
    if schema is None:
        return 0, {**{f"#{i}": a for i, a in enumerate(args)}, **kwargs}, [f"#{i}" for i in range(len(args))]
    # Keyed operators take no generator: torch lets some of its own have one by position.
    names = [a.name for a in schema if not a.kwarg_only and a.name != "generator"]
    prefix = 0 if isinstance(unwrap_settings(node.target), torch._ops.OpOverload) else _count_leading_arguments(node)
    given = dict(zip(names, args[prefix:], strict=False))
    result = {a.name: given.get(a.name, kwargs.get(a.name, _default_value(a))) for a in schema}
    return prefix, {**result, **{k: v for k, v in kwargs.items() if k not in result}}, names


def _default_value(argument: Any) -> Any:
    """What an argument is by default: a schema has torch's own number of a dtype, which Python does not know."""
    is_dtype = argument.name == "dtype" and isinstance(argument.default_value, int)
    return _DTYPES[argument.default_value] if is_dtype else argument.default_value


def _count_leading_arguments(node: fx.Node) -> int:
    """The part in hand, and for keyed operators the salt and the dimension of the samples."""
    target = unwrap_settings(node.target)
    return 1 if getattr(target, "__name__", "") == "batch_norm" else 3


def operator_name(node: fx.Node) -> str:
    """ "aten.linear.default"; the name that capture saw, where an operator of our own stands in for it."""
    return str(node.meta.get("op") or op_name(node))


def _schema(op: str) -> Any:
    if not op.startswith("aten."):
        return None
    _, base, overload = op.split(".")
    function = getattr(getattr(torch.ops.aten, base, None), overload, None)
    return None if function is None else function._schema.arguments


def make_call(
    node: fx.Node, sizes: ViewSizes, degree: int, has_gradient: Callable[[fx.Node], bool]
) -> tuple[OperatorCall, tuple[TensorKey, ...]]:
    """A node as a call, and where its inputs come from."""
    prefix, arguments, _ = bind_arguments(node, node.args, node.kwargs)
    inputs, reads, nodes = list[TensorValue](), list[TensorKey](), list[fx.Node]()

    def settle(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(value.target, SymbolicSize):
                return sizes.number(value)
            val = value.meta.get("val")
            if not isinstance(val, Tensor):
                return sizes.data_dependent_number(value)
            grad = has_gradient(value) and (val.is_floating_point() or val.is_complex())
            inputs.append(TensorValue(sizes.shape(val), val.dtype, grad, len(inputs)))
            reads.append(tensor_key(value))
            nodes.append(value)
            return inputs[-1]
        if isinstance(value, (list, tuple)):
            return [settle(v) for v in value]
        return {k: settle(v) for k, v in value.items()} if isinstance(value, dict) else value

    settled = {name: settle(value) for name, value in arguments.items()}
    val = node.meta.get("val")
    vals = list(val) if isinstance(val, (list, tuple)) else [val]
    flows = has_gradient(node)
    outputs = tuple(
        TensorValue(sizes.shape(v), v.dtype, flows and (v.is_floating_point() or v.is_complex()), i, "out")
        for i, v in enumerate(vals)
        if isinstance(v, Tensor)
    )
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
    """The running statistics that a batch normalization in training writes."""
    if not operator_name(node).startswith("aten.batch_norm") or not arguments.get("training"):
        return set()
    return {id(arguments[k]) for k in ("running_mean", "running_var") if isinstance(arguments.get(k), fx.Node)}


def with_neighbour_cuts(call: OperatorCall, candidates: Mapping[Place, tuple[Cuts, ...]]) -> OperatorCall:
    """A call that knows how its neighbours may be cut."""
    return replace(call, neighbour_cuts=dict(candidates))
