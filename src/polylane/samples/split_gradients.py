"""Split test of gradients: those of a small batch's parts must add up to the whole's, for every parameter, in float64.

What is proven of a graph's operators holds for their backward passes too. Of the user's own Python only this shows that
its backward pass (a custom function's, a hook's) treats each sample independently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.capture.assign_keys import PythonOnSlice, copy_python_call
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.capture.self_check import placeholder_value
from polylane.graph.flops import tensors_of
from polylane.graph.graph import Graph, Node
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.nodes.facts import is_unfilled, unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.whole_batch_counts import WholeBatchStatistic
from polylane.graph.precision import Promoted
from polylane.graph.rounding_noise import MARGIN, max_magnitude, rounding_floor
from polylane.graph.sparse_gradients import densify
from polylane.samples.autograd.function_trace import compute_gradients
from polylane.samples.batch_layout import describe_place
from polylane.samples.split_runs import (
    TOLERANCE,
    SplitRun,
    WithoutRandomness,
    equal_within,
    run_as_replicas,
)


@dataclass
class _Passes:
    """Forward and backward pass of one run.

    Attributes:
        parameters: gradients by canonical name; zeros where none came.
        inputs: gradients of the inputs of nodes that run the user's own Python, by node's name and index.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)


def describe_unequal_gradients(graph: Graph, runs: Sequence[SplitRun]) -> str | None:
    """Return what makes the gradients of the parts differ from the whole's, as a sentence; None if nothing does.

    Args:
        graph: captured graph, which runs the user's own Python.
        runs: the whole batch (with nudged runs, from which the size of rounding is measured) and its parts.
    """
    with torch.random.fork_rng(devices=[]):
        return _describe_difference(graph, runs)


def _describe_difference(graph: Graph, runs: Sequence[SplitRun]) -> str | None:
    whole_run, *parts = runs
    counts: dict[str, Any] = {}  # statistics of the whole batch, which the parts need
    expected, *nudged = [_run_passes(graph, run, run.part, counts, 1.0) for run in (whole_run, *whole_run.nudged_runs)]
    shares = [run.part.samples / whole_run.part.samples if graph.loss_is_mean else 1.0 for run in parts]

    def work(i: int, sum_replicas: Callable[[Tensor], Tensor]) -> _Passes:
        part = dataclasses.replace(parts[i].part, sum_replicas=sum_replicas, whole=lambda key, local_value: counts[key])
        return _run_passes(graph, parts[i], part, counts, shares[i])

    part_passes = run_as_replicas(len(parts), work)
    limit = max(map(max_magnitude, expected.parameters.values()), default=0.0) * TOLERANCE / MARGIN
    for name, gradient in expected.parameters.items():
        floor = min(rounding_floor(gradient, [passes.parameters[name] for passes in nudged]), limit)
        if not equal_within(gradient, sum(passes.parameters[name] for passes in part_passes), floor):
            node = _find_joining_node(graph, expected, part_passes)
            return (
                f"{node.name} {describe_place(node)} makes the gradient of each sample depend on the others of its "
                f"batch (seen at {name})"
            )
    return None


def _find_joining_node(graph: Graph, expected: _Passes, part_passes: Sequence[_Passes]) -> Node:
    """Return the first node of the backward pass whose inputs' gradients are not made up of the parts'."""
    python_nodes = [node for node in graph.nodes if node.is_own_python]
    for node in reversed(python_nodes):
        keys = [key for key in expected.inputs if key[0] == node.id]
        if any(key in passes.inputs for passes in part_passes for key in keys) and not all(
            _is_made_of(expected.inputs[key], [passes.inputs[key] for passes in part_passes if key in passes.inputs])
            for key in keys
        ):
            return node
    return python_nodes[0]


def _is_made_of(gradient: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether a gradient is made of the parts': of their rows one after another, or of their sum."""
    if all(part.shape == gradient.shape for part in parts):
        return equal_within(gradient, sum(parts))
    along = [d for d in range(gradient.dim()) if sum(part.shape[d] for part in parts) == gradient.shape[d]]
    return any(equal_within(gradient, torch.cat(list(parts), d)) for d in along)


def _run_passes(graph: Graph, run: SplitRun, part: SampleSlice, counts: dict[str, Any], seed: float) -> _Passes:
    """Run forward and backward, without random numbers; the gradient of the loss begins as ``seed``."""
    passes, table = _Passes(), run.tensors_by_role["parameter"]
    trained = {n: table[n].requires_grad_() for n, info in graph.parameters.items() if info.trainable and n in table}
    with torch.enable_grad(), Promoted(), WithoutRandomness():
        interpreter = _GradientInterpreter(graph, run, part, counts, passes)
        loss = interpreter.run()[0]
        got = compute_gradients([loss], list(trained.values()), [torch.full_like(loss, seed)])
    for (name, parameter), gradient in zip(trained.items(), got, strict=True):
        passes.parameters[name] = torch.zeros_like(parameter) if gradient is None else densify(gradient)
    return passes


class _GradientInterpreter(GraphInterpreter):
    """Interprets one run with autograd; the gradients of what the user's own Python is given are recorded."""

    def __init__(self, graph: Graph, run: SplitRun, part: SampleSlice, counts: dict[str, Any], passes: _Passes) -> None:
        super().__init__(graph.code.fx, lambda node: placeholder_value(node, run.tensors_by_role, part))
        self._counts, self._found = counts, passes

    def call_operator(self, node: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        target: Any = unwrap_settings(node.target)
        if is_unfilled(str(node.meta["op"])):
            return target(*args, **kwargs).zero_()
        if isinstance(target, WholeBatchStatistic):
            value = target(*args, **kwargs)
            return self._counts.setdefault(target.key, value)
        if isinstance(target, (PythonOnSlice, FunctionCall)):
            for index, tensor in enumerate(tensors_of(args[1])):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._record, (node.name, index)))
            target = copy_python_call(target)
        return target(*args, **kwargs)

    def _record(self, key: tuple[str, int], gradient: Tensor) -> None:
        self._found.inputs[key] = densify(gradient).detach().clone()
