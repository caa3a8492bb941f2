"""Compiled regions: runs of torch operators in a stage's code, each compiled by inductor (``torch.compile``).

Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation",
ASPLOS 2024. A stage's code is cut at every call that is more than one of torch's operators:

    linear, gelu │ dropout by key │ linear, add, layer_norm │ all-reduce │ linear …
    compiled       called           compiled                   called       compiled

What is called stays as it is: random numbers by key, collectives of split operators, batch statistics over replicas,
gates of sharded parameters, calls that defer a weight's gradient or drop a value to recompute it, and the user's own
Python. So a schedule, a mesh and a rule of synchronization mean the same with compiled code. A region is compiled in
the worker that runs it, forward at its first call and backward at its first backward pass, for the shapes that come.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from polylane.errors import PolylaneError
from polylane.graph.nodes.user_lines import reason_of

BACKEND = "inductor"  # of torch.compile

LEAST = 2  # operators that compute in a region: of a single one there is nothing to fuse

# Operators that look at a tensor's form, or give it another one, without computing.
_VIEWS = frozenset(
    {"view", "reshape", "unflatten", "flatten", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice"}
    | {"select", "unbind", "split", "chunk", "alias", "detach", "split_with_sizes", "narrow", "movedim", "expand_as"}
    | {"sym_size", "sym_numel", "sym_stride", "view_as"}
)


class CompiledRegion:
    """A region as one call of the stage's code; its result is a tuple of the values that others read.

    Args:
        graph: the region's operators, with a placeholder for each value that it reads.
        device: device that computes it.
    """

    __module__ = "polylane"
    __name__ = "compiled_region"

    def __init__(self, graph: fx.Graph, device: torch.device) -> None:
        self.module, self._on_host = fx.GraphModule(torch.nn.Module(), graph), device.type == "cpu"
        self._compiled: Callable[..., Any] = torch.compile(self.module.forward, fullgraph=True, backend=BACKEND)

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        import torch._inductor.config as inductor

        # A pool of compiling processes does not survive a fork, and workers of one host share its cores.
        # The script around it may run what it has compiled itself eagerly.
        stance = torch.compiler.set_stance("default")
        with stance, inductor.patch(compile_threads=1) if self._on_host else nullcontext():
            result: tuple[Any, ...] = self._compiled(*values)
        return result


def with_compiled_regions(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Return a copy of a stage's code in which each region is one call; nodes keep their names where they are called.

    Args:
        graph: the code, as one rank runs it; it is not changed.
        device: device that computes it.
    """
    region_of = {node: index for index, region in enumerate(_find_regions(graph)) for node in region}
    regions: dict[int, list[fx.Node]] = {}
    for node, index in region_of.items():
        regions.setdefault(index, []).append(node)
    new_graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "output":
            new_graph.output(fx.map_arg(node.args[0], lambda n: values[n]))
        elif node not in region_of:
            values[node] = copied = new_graph.node_copy(node, lambda n: values[n])
            copied.meta = dict(node.meta)
        elif node is regions[region_of[node]][-1]:  # all of them run where the last one did: nothing is between
            _add_call(new_graph, regions[region_of[node]], values, device)
    return new_graph


def _find_regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the runs of torch operators that are worth compiling, in order."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function" and _is_compilable(node.target):
            runs[-1].append(node)
        elif node.op == "call_function":
            runs.append([])
    return [run for run in runs if sum(map(_computes, run)) >= LEAST]


def _is_compilable(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in target.tags
    return target in (operator.getitem, operator.add, operator.mul, operator.sub, operator.floordiv, operator.neg)


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ not in _VIEWS


def _add_call(graph: fx.Graph, region: Sequence[fx.Node], values: dict[fx.Node, fx.Node], device: torch.device) -> None:
    """Add a region's call to the graph, and make its results the values of the nodes that others read."""
    members = set(region)
    reads = list(dict.fromkeys(i for node in region for i in node.all_input_nodes if i not in members))
    results = [node for node in region if any(user not in members for user in node.users)]
    body, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in reads:
        copies[node] = body.placeholder(node.name)
    for node in region:
        copies[node] = body.node_copy(node, lambda n: copies[n])
        copies[node].meta = {}
    body.output(tuple(copies[node] for node in results))
    call = graph.call_function(CompiledRegion(body, device), tuple(values[node] for node in reads))
    named = next((node for node in region if "name" in node.meta), None)
    call.meta = {} if named is None else {"name": named.meta["name"]}
    for index, node in enumerate(results):
        values[node] = graph.call_function(operator.getitem, (call, index))
        values[node].meta = dict(node.meta)


def refuse_without_compiler(device: torch.device) -> None:
    """Refuse a device for which inductor cannot generate code.

    Raises:
        PolylaneError: there is no C++ compiler for the CPU, or no Triton for the accelerator.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise PolylaneError(
                f"compile=yes needs a C++ compiler, and inductor finds none ({reason_of(error)}): install g++, or set "
                "CXX, or leave compile out"
            ) from None
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise PolylaneError(
            f"compile=yes needs Triton for {device.type}, which is not installed or does not know this device: "
            "install triton, or leave compile out"
        )
