"""Recomputed pieces: parts of a stage's graph that run again in a backward pass, each as a function of kept values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from polylane.graph.capture.repeatable import without_effect
from polylane.graph.nodes.memory import storage_id
from polylane.runtime.pipeline.generated_code import GeneratedCode, generate_code

# By fx node: for each tensor among its arguments, whether it required a gradient in the forward pass.
Flags = Mapping[str, tuple[bool, ...]]


@dataclass(frozen=True)
class Piece:
    """Dropped nodes that feed each other, as one function.

    Attributes:
        names: names of its fx nodes.
        inputs: names of the nodes and placeholders whose kept values it reads, in the order of first use.
        results: names of the nodes whose results it returns.
        code: the function of the inputs.
        calls: its calls that save tensors of their own, which are made again under autograd.
    """

    names: frozenset[str]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    code: GeneratedCode
    calls: tuple[_SavingCall, ...]

    def run(self, inputs: Sequence[Any], flags: Flags) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
        """Run the piece; return the results by name, and what nodes save besides inputs and results, by name."""
        for call in self.calls:
            call.flags = flags[call.name]
        try:
            values = self.code.run(*inputs)
            return dict(zip(self.results, values, strict=True)), {call.name: call.saved for call in self.calls}
        finally:
            for call in self.calls:
                call.saved = []


def cut_pieces(graph: fx.Graph, dropped: Set[str], values: Set[str], inner: Set[str]) -> tuple[Piece, ...]:
    """Cut out of a stage's code what must run again: requested dropped nodes, and those that feed them.

    Args:
        graph: the code of the stage, as one rank runs it.
        dropped: names of all nodes whose results are dropped.
        values: names of the nodes whose results are wanted.
        inner: names of those of which the tensors that autograd saves inside are wanted.
    """
    repeated_names = set(values) | set(inner)
    wired = nx.Graph()
    for node in reversed(graph.nodes):
        if node.name in repeated_names:
            wired.add_node(node.name)
            for source in _inputs_again(node):
                if source.name in dropped:
                    repeated_names.add(source.name)
                    wired.add_edge(node.name, source.name)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    groups = sorted(nx.connected_components(wired), key=lambda names: min(order[name] for name in names))
    return tuple(_cut_piece(graph, frozenset(names), dropped, values, inner) for names in groups)


def _cut_piece(graph: fx.Graph, names: frozenset[str], dropped: Set[str], values: Set[str], inner: Set[str]) -> Piece:
    body = [node for node in graph.nodes if node.name in names]
    dropped_nodes = {node for node in body if node.name in dropped}
    piece, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    # Placeholders first, in the order in which the piece reads them; a node's kept result is an input, too.
    for node in body:
        for source in _inputs_again(node):
            if source not in dropped_nodes and source not in copies:
                copies[source] = piece.placeholder(f"kept_{source.name}")
    inputs, calls, results = tuple(node.name for node in copies), list[_SavingCall](), dict[str, fx.Node]()
    for node in body:
        copied = piece.create_node(
            "call_function",
            node.target,
            fx.map_arg(without_effect(node), copies.__getitem__),
            fx.map_arg(dict(node.kwargs), copies.__getitem__),
            name=node.name,
        )
        copied.meta = {"name": node.meta["name"]}
        if node.name in inner:
            call = _SavingCall(node)
            copied.target = call
            calls.append(call)
        if node in dropped_nodes:
            copies[node] = copied
        if node.name in values:
            results[node.name] = copied
    piece.output(tuple(results.values()))
    code = generate_code(piece, f"recomputation of {body[0].meta['name']}")
    return Piece(names, inputs, tuple(results), code, tuple(calls))


def _inputs_again(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node's second run reads."""
    inputs: dict[fx.Node, None] = {}
    fx.map_arg((without_effect(node), dict(node.kwargs)), lambda source: inputs.setdefault(source))
    return list(inputs)


class _SavingCall:
    """Runs an operator under autograd, for the tensors that it saves besides inputs and results.

    Autograd's graph is thrown away: inputs are detached, and what would be saved is only collected.

    Attributes:
        name: name of the fx node.
        flags: for each tensor among its arguments, whether it requires a gradient.
        saved: what the last call saved.
    """

    __module__ = "polylane"

    def __init__(self, node: fx.Node) -> None:
        self.target: Any = node.target
        self.name = node.name
        self.__name__ = str(getattr(node.target, "__name__", "call")).replace(".", "_")
        self.flags: tuple[bool, ...] = ()
        self.saved: list[Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flags, inputs, saved = iter(self.flags), set[int](), list[Tensor]()

        def open_gradient(tensor: Tensor) -> Tensor:
            inputs.add(storage_id(tensor))
            return tensor.detach().requires_grad_(next(flags))

        def pack(tensor: Tensor) -> None:
            strided = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
            if strided and storage_id(tensor) not in inputs:
                saved.append(tensor.detach())

        args, kwargs = map_tensors(open_gradient, args), map_tensors(open_gradient, kwargs)
        with torch.enable_grad(), saved_tensors_hooks(pack, _never_unpack):
            result = self.target(*args, **kwargs)
        self.saved = saved
        return map_tensors(Tensor.detach, result)


def _never_unpack(handle: Any) -> Tensor:
    raise AssertionError("a recomputed operator has no backward pass of its own")


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return nested values with a function applied to their tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return (
            [map_tensors(function, v) for v in value]
            if isinstance(value, list)
            else tuple(map_tensors(function, v) for v in value)
        )
    return {key: map_tensors(function, v) for key, v in value.items()} if isinstance(value, dict) else value


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of nested values, in the order of :func:`map_tensors`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in list_tensors(item)]
    return [tensor for item in value.values() for tensor in list_tensors(item)] if isinstance(value, dict) else []
