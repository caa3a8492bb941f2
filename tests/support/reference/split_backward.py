"""Stages run in one process, with backward passes at once or in two halves, side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import Partition, cut_positions
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.stage_code import extract_stage
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.runtime.stage_hooks import StageHooks

CPU = torch.device("cpu")


@dataclass
class Pipeline:
    """The stages of a captured model, one after another in one process.

    Attributes:
        model: holds the parameters and buffers.
        runners: one for each stage.
        partition: the graph and its cuts.
    """

    model: nn.Module
    runners: list[StageRunner]
    partition: Partition
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def forward(self, microbatch: int, leaves: Sequence[Any], part: SampleSlice) -> None:
        """Run the forward passes of all stages."""
        values = self.values.setdefault(microbatch, {})
        for stage, runner in enumerate(self.runners):
            incoming = {
                c.value: values[c.value].detach().clone() for c in self.partition.crossings if stage in c.consumers
            }
            values |= runner.forward(microbatch, incoming, leaves, part).outputs

    def backward(self, microbatch: int, run: Callable[..., dict[str, Tensor]] | str = "backward") -> dict[str, Tensor]:
        """Run the backward passes of all stages; return the gradients of all values that cross."""
        del self.values[microbatch]
        gradients = self.gradients.setdefault(microbatch, {})
        for stage in reversed(range(len(self.runners))):
            crossings = [c for c in self.partition.crossings if c.producer == stage and c.requires_grad]
            own = {c.value: gradients[c.value] for c in crossings if c.value in gradients}
            seed = torch.ones((), dtype=torch.float64) if stage == self.partition.loss_stage else None
            for name, gradient in getattr(self.runners[stage], str(run))(microbatch, own, seed).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def backward_weight(self, microbatch: int) -> None:
        """Run the second halves of all stages."""
        for runner in reversed(self.runners):
            runner.backward_weight(microbatch)


def pipeline(
    model: nn.Module,
    graph: Graph,
    stages: int,
    splits: bool,
    losses: Sequence[Any] = (),
    autocast: torch.dtype | None = None,
) -> Pipeline:
    """The stages of a captured model, cut into as equal numbers of operators as can be."""
    positions = cut_positions(graph)
    cuts = sorted({positions[len(positions) * s // stages] for s in range(1, stages)}) if positions else []
    partition = Partition(graph, tuple(cuts))
    tensors = ModelTensors(model, list(losses), CPU)
    table: dict[tuple[str, Any], Any] = {
        ("parameter", n): p if graph.parameters[n].trainable else p.detach()
        for n, p in tensors.parameters().items()
        if n in graph.parameters
    }
    table |= {("buffer", n): b for n, b in tensors.buffers().items()}
    table |= {("constant", n): c for n, c in graph.code.constants.items()}
    runners = []
    for stage in range(partition.stages):
        incoming = {c.value for c in partition.crossings if stage in c.consumers and c.requires_grad}
        code = extract_stage(partition, stage, CPU, StageHooks(), splits)
        runners.append(StageRunner(code, table, frozenset(incoming), CPU, autocast))
    return Pipeline(model, runners, partition)


def take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters' gradients, and forget them."""
    found = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def interleavings(microbatches: int, seed: int) -> list[tuple[str, int]]:
    """Passes in an order as schedules have: each kind ascending, each microbatch's forward, input, weight in turn."""
    draw, done, order = random.Random(seed), [0, 0, 0], list[tuple[str, int]]()
    while done[2] < microbatches:
        kinds = [i for i in range(3) if done[i] < (microbatches if i == 0 else done[i - 1])]
        kind = draw.choice(kinds)
        order.append((("forward", "backward_input", "backward_weight")[kind], done[kind]))
        done[kind] += 1
    return order
