"""Operator timing: seconds of each node, forward and backward, on real data; nominal rates on the meta device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.cost.operators.profile import Both
from polylane.graph.batch import sample_count, to_device
from polylane.graph.capture.export import Loss, ModelWithLoss, model_restored
from polylane.graph.capture.self_check import placeholder_value, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.device_arguments import copy_to_device
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.python_state.moved_module import moved_module

REPEATS = 3  # of each operator; a graph has thousands, whose errors average out

# Overhead of an operator where nothing can be measured.
OVERHEAD_SECONDS = 5e-6


def nominal_seconds(graph: Graph) -> tuple[Both, ...]:
    """Return nominal seconds of every node, forward and backward, by a roofline; only their ratios matter.

    A backward pass counts twice: it computes two products for each product of the forward pass.
    """
    rates, by_name = RankSpeed(), {node.name: node for node in graph.nodes}
    result = []
    for node in graph.nodes:
        moved = node.bytes + sum(by_name[name].bytes for name in node.inputs)
        forward = OVERHEAD_SECONDS + rates.roofline(node.flops, moved)
        result.append((forward, 2 * forward if node.requires_grad else 0.0))
    return tuple(result)


def measure(
    graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any], device: torch.device | None = None
) -> tuple[float, ...]:
    """Return the seconds of every node of ``graph``, forward plus backward; see :func:`measure_both`."""
    return tuple(map(sum, measure_both(graph, model, loss, leaves, device=device)))


def measure_both(
    graph: Graph,
    model: nn.Module,
    loss: Loss,
    leaves: Sequence[Any],
    only: str = "",
    device: torch.device | None = None,
) -> tuple[Both, ...]:
    """Measure the seconds of every node of ``graph``, forward and backward, on the batch ``leaves``.

    Each kind of node (same operator, same shapes) runs :data:`REPEATS` times after a warm-up, and so does its backward
    pass with respect to all its inputs; the median counts for all nodes of the kind. Weights, buffers, gradients and
    the random state are restored. On the meta device, and for an opaque graph, nominal rates are used.

    Args:
        graph: captured from ``model`` and ``loss``.
        model, loss: the user's, which are as they were afterwards.
        leaves: flat batch on the model's device.
        only: operator whose nodes alone are measured, with the batch statistics of replicas but without their
            all-reduce; all others count as 0. Default: all nodes, without replicas.
        device: device to measure, to which all is moved while it is; where the graph does not run there, for want of
            memory or for tensors that stay on the host, it is measured where the model is. None: there.
    """
    if graph.is_opaque or any(p.is_meta for p in model.parameters()):
        return nominal_seconds(graph)
    model_with_loss = ModelWithLoss(model, loss, lambda flat: flat)
    with model_restored(model_with_loss):
        if device is not None and any(parameter.device != device for parameter in model_with_loss.parameters()):
            # Where the device's memory does not hold the model, it is measured where it is.
            with suppress(RuntimeError), moved_module(model_with_loss, device), model_restored(model_with_loss):
                constants = {name: value.to(device) for name, value in graph.code.constants.items()}
                code = replace(graph.code, fx=copy_to_device(graph.code.fx, device), constants=constants)
                return _measured(replace(graph, code=code), model_with_loss, to_device(leaves, device), only)
        return _measured(graph, model_with_loss, leaves, only)


def _measured(graph: Graph, model_with_loss: ModelWithLoss, leaves: Sequence[Any], only: str) -> tuple[Both, ...]:
    samples = sample_count(leaves)
    inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    table = tensors_by_role(model_with_loss, graph.code.constants, inputs)
    # A single replica's sum over replicas is its own value.
    part = SampleSlice(
        samples,
        batch=samples,
        sum_replicas=(lambda tensor: tensor) if only else None,
        open_sizes=graph.code.nominal_sizes,
    )
    wait = wait_for(next((p.device for p in model_with_loss.parameters()), torch.device("cpu")))
    # Values are freed after their last reader, so that timing needs no more memory than a forward pass.
    last_use = {used: node for node in graph.code.fx.nodes for used in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    seconds: dict[str, Both] = {}
    kinds: dict[Any, Both] = {}
    for node in graph.code.fx.nodes:
        if node.op == "placeholder":
            values[node] = placeholder_value(node, table, part)
        elif node.op == "call_function":
            if only and node.meta["op"] != only:
                seconds[node.name] = (0.0, 0.0)
            else:
                kind = _kind(node, values)
                if kind not in kinds:
                    kinds[kind] = _written(node, values, wait) if _writes_memory(node) else _timed(node, values, wait)
                seconds[node.name] = kinds[kind]
            if node in values:
                pass  # the node was run to be timed
            elif written_arguments(node):
                _written(node, values, wait)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _leaf(values[used]))
                values[node] = _detached(node.target(*args, **kwargs))
            for operand in [used for used in node.all_input_nodes if last_use[used] is node]:
                del values[operand]
    return tuple(seconds[node.id] for node in graph.nodes)


def wait_for(device: torch.device) -> Callable[[], None]:
    """Return the function that waits for a device, which computes asynchronously, before the clock is read."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _writes_memory(node: fx.Node) -> bool:
    return bool(written_arguments(node)) and isinstance(node.target, torch._ops.OpOverload)


def _kind(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return what a node's time depends on; every call of the user's own Python is of its own kind."""
    if node.meta["op"] in ("leaf", "function"):
        return node
    # Sizes that are computed are arguments like others: of a slice they say where it begins and ends.
    shapes = tuple(
        (tuple(v.shape), v.stride(), v.dtype, v.requires_grad)
        if isinstance(v, Tensor)
        else v
        if isinstance(v, (bool, int, float))
        else None
        for v in (values[used] for used in node.all_input_nodes)
    )
    constants = fx.map_arg((node.args, dict(node.kwargs)), lambda used: None)
    # Keyed random operators begin with sample slice, salt and sample dimension, which do not change the time.
    keyless = constants[0][3:] if node.target in KEYED.values() else constants[0]
    return node.meta["op"], shapes, repr((keyless, constants[1]))


def _timed(node: fx.Node, values: dict[fx.Node, Any], wait: Callable[[], None]) -> Both:
    times = list[Both]()
    for _ in range(REPEATS + 1):
        fresh = {used: _leaf(values[used]) for used in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), fresh.__getitem__)
        wait()
        start = time.perf_counter()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        wait()
        forward = time.perf_counter() - start
        times.append((forward, _backward_seconds(result, list(fresh.values()), wait)))
    values[node] = _detached(result)
    return statistics.median(f for f, _ in times[1:]), statistics.median(b for _, b in times[1:])


def _written(node: fx.Node, values: dict[fx.Node, Any], wait: Callable[[], None]) -> Both:
    """Time an in-place write once, without autograd, which refuses it on leaves; backward counts the same."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    flows = any(isinstance(values[used], Tensor) and values[used].requires_grad for used in node.all_input_nodes)
    with torch.no_grad():
        start = time.perf_counter()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        wait()
        seconds = time.perf_counter() - start
    if isinstance(result, Tensor):
        result = result.detach().requires_grad_(flows and (result.is_floating_point() or result.is_complex()))
    values[node] = result
    return seconds, seconds if flows else 0.0


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    return value.detach().requires_grad_(value.requires_grad and value.is_floating_point())


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach().requires_grad_(result.requires_grad)
    return [_detached(r) for r in result] if isinstance(result, (list, tuple)) else result


def _backward_seconds(result: Any, inputs: Sequence[Any], wait: Callable[[], None]) -> float:
    results = result if isinstance(result, (list, tuple)) else [result]
    outputs = [out for out in results if isinstance(out, Tensor) and out.requires_grad]
    grad_inputs = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    if not outputs or not grad_inputs:
        return 0.0
    seeds = [torch.ones_like(out) for out in outputs]
    wait()
    start = time.perf_counter()
    try:
        torch.autograd.grad(outputs, grad_inputs, seeds, allow_unused=True)
    except RuntimeError as error:
        # An operator of a gradient inside of the loss that has no derivative: a training that needs it does not run.
        if "derivative for" not in str(error):
            raise
        return 0.0
    wait()
    return time.perf_counter() - start
