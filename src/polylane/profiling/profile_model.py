"""Model profile: seconds of a model's nodes one by one, of whole passes and of an optimizer step, on its own device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from polylane.cost.memory.optimizer_state import Factory
from polylane.cost.operators.profile import Both, Profile
from polylane.graph.batch import Rebuild, clone_leaves, sample_count, take_first_samples
from polylane.graph.capture.export import Loss, ModelWithLoss, model_restored
from polylane.graph.graph import Graph
from polylane.optim.modes import set_mode
from polylane.profiling.machine_load import LoadWatch
from polylane.profiling.time_operators import measure_both, wait_for

REPEATS = 5  # whole passes: the median of five is not moved by two that something else has disturbed

# Operator whose statistics replicas may share; it is then timed once more in its synchronized form.
NORM = "aten.batch_norm.default"


def profiled(
    graph: Graph,
    model: nn.Module,
    loss: Loss,
    optimizer: Factory,
    leaves: Sequence[Any],
    rebuild: Rebuild,
    sizes: Sequence[int],
    watch: LoadWatch | None = None,
) -> Profile:
    """Measure a graph's nodes, its model's passes and an optimizer step at some batch sizes.

    Weights, buffers, gradients and the random state are restored. Whole passes run as in a plain training loop.

    Args:
        graph: captured from ``model`` and ``loss``.
        model, loss: the user's, on the device to measure.
        optimizer: (name, parameter) pairs -> optimizer.
        leaves, rebuild: flat batch of at least the largest size, and the function that restores its structure.
        sizes: batch sizes to measure; larger ones than the batch are left out.
        watch: of the host, whose loop is timed before every size.
    """
    batch_sizes = sorted({n for n in sizes if 1 <= n <= sample_count(leaves)}) or [sample_count(leaves)]
    nodes: dict[str, list[Both]] = {node.name: [] for node in graph.nodes}
    shared: dict[str, list[Both]] = {
        n.name: [] for n in graph.nodes if graph.code.has_batch_statistics and n.op == NORM
    }
    steps = []
    for samples in batch_sizes:
        if watch is not None:
            watch.time_loop()
        part = take_first_samples(leaves, samples)
        for node, seconds in zip(graph.nodes, measure_both(graph, model, loss, clone_leaves(part)), strict=True):
            nodes[node.name].append(seconds)
        if shared:
            shared_seconds = measure_both(graph, model, loss, clone_leaves(part), NORM)
            for node, seconds in zip(graph.nodes, shared_seconds, strict=True):
                if node.name in shared:
                    shared[node.name].append(seconds)
        steps.append(passes(model, loss, part, rebuild))
    of_nodes, of_shared = ({name: tuple(pairs) for name, pairs in table.items()} for table in (nodes, shared))
    return Profile(tuple(batch_sizes), of_nodes, tuple(steps), _update(model, loss, optimizer), of_shared)


def passes(model: nn.Module, loss: Loss, leaves: Sequence[Any], rebuild: Rebuild) -> Both:
    """Return the median seconds of a forward and a backward pass; gradients accumulate into existing ones."""
    model_with_loss = ModelWithLoss(model, loss, rebuild)
    wait = wait_for(next((p.device for p in model_with_loss.parameters()), torch.device("cpu")))
    times: list[Both] = []
    with model_restored(model_with_loss):
        # The first repetition warms up and is dropped.
        for _ in range(REPEATS + 1):
            inputs = clone_leaves(leaves)
            wait()
            start = time.perf_counter()
            result = model_with_loss(*inputs)
            wait()
            middle = time.perf_counter()
            result[0].backward()
            wait()
            times.append((middle - start, time.perf_counter() - middle))
    return statistics.median(f for f, _ in times[1:]), statistics.median(b for _, b in times[1:])


def _update(model: nn.Module, loss: Loss, factory: Factory) -> float:
    """Return the median seconds of an optimizer step on all parameters, zero_grad included."""
    named = list(model.named_parameters())
    if isinstance(loss, nn.Module):
        named += [(f"loss.{name}", parameter) for name, parameter in loss.named_parameters()]
    wait = wait_for(named[0][1].device if named else torch.device("cpu"))
    times = []
    with model_restored(model):
        optimizer = factory(named)
        set_mode(optimizer, True)
        for _ in range(REPEATS + 1):
            for _, parameter in named:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            wait()
            start = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            wait()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
