"""How long each node takes, forward and backward: measured on real data, or estimated from its operations and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph.batch import sample_count
from polylane.graph.export import Loss, Whole, snapshot
from polylane.graph.graph import Graph
from polylane.graph.part import Part

REPEATS = 3

# Nominal rates where nothing can be measured; only their ratio matters for where to cut.
FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10
OVERHEAD_SECONDS = 5e-6


def estimate(graph: Graph) -> tuple[float, ...]:
    """Seconds of every node, forward and backward, by the roofline: operations or bytes, whichever takes longer.

    A backward pass computes two products for each one of the forward pass.
    """
    by_name = {node.name: node for node in graph.nodes}
    result = []
    for node in graph.nodes:
        moved = node.bytes + sum(by_name[name].bytes for name in node.inputs)
        forward = OVERHEAD_SECONDS + max(node.flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
        result.append(forward * (3 if node.requires_grad else 1))
    return tuple(result)


def measure(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> tuple[float, ...]:
    """Seconds of every node of ``graph``, forward and backward, on the batch ``leaves``; falls back on :func:`estimate`.

    Each node runs on real values, :data:`REPEATS` times after a warm-up, and so does its backward pass with respect to all
    that it reads; the median counts. Weights, buffers and the random state stay as they were.
    """
    if graph.opaque or any(p.is_meta for p in model.parameters()):
        return estimate(graph)
    whole = Whole(model, loss, lambda flat: flat)
    restore = snapshot(whole)
    try:
        return _measured(graph, whole, leaves)
    finally:
        restore()


def _measured(graph: Graph, whole: Whole, leaves: Sequence[Any]) -> tuple[float, ...]:
    samples = sample_count(leaves)
    tables: dict[str, Any] = {
        "parameter": {n.removeprefix("model."): p for n, p in whole.named_parameters(remove_duplicate=False)},
        "buffer": {n.removeprefix("model."): b for n, b in whole.named_buffers(remove_duplicate=False)},
        "constant": graph.code.constants,
        "input": leaves,
        "part": [Part(samples, batch=samples)],
    }
    last_use = {n: node for node in graph.code.fx.nodes for n in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    seconds: dict[str, float] = {}
    for node in graph.code.fx.nodes:
        if node.op == "placeholder":
            kind, key = node.meta["role"]
            values[node] = tables[kind][key]
        elif node.op == "call_function":
            values[node], seconds[node.meta["name"]] = _timed(node, values)
            for done in [n for n in node.all_input_nodes if last_use[n] is node]:
                values.pop(done, None)
    return tuple(seconds[node.name] for node in graph.nodes)


def _timed(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, float]:
    times = []
    for _ in range(REPEATS + 1):
        fresh = {n: _leaf(values[n]) for n in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), fresh.__getitem__)
        start = time.perf_counter()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        middle = time.perf_counter()
        times.append(middle - start + _backward_seconds(result, list(fresh.values())))
    return _detached(result), statistics.median(times[1:])


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.detach().requires_grad_(value.requires_grad and value.is_floating_point())


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().requires_grad_(result.requires_grad)
    return [_detached(r) for r in result] if isinstance(result, (list, tuple)) else result


def _backward_seconds(result: Any, inputs: Sequence[Any]) -> float:
    outputs = [r for r in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(r, Tensor) and r.requires_grad]
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not outputs or not wanted:
        return 0.0
    seeds = [torch.ones_like(out) for out in outputs]
    start = time.perf_counter()
    torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return time.perf_counter() - start
