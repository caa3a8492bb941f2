"""A pass by a plan in which every worker keeps all its values, or their gradients: to find where two runs part ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polylane.graph.part import Part
from polylane.program.lower import lower_evaluation
from polylane.runtime.division import Batch
from polylane.runtime.holding import holders_of
from polylane.runtime.lane import programs_of
from polylane.runtime.prepare import Prepared
from polylane.runtime.stage import Live, StageRunner, values_of
from polylane.runtime.stale import own_calls
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.world import World


@dataclass
class Trace:
    """One worker's values of a pass: (microbatch, node name) -> value, or its gradient."""

    stage: int
    replica: int
    coordinates: Mapping[str, int]
    values: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)


class Values:
    """Keeps the values of a pass by node name."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        """Keep one as it is now: somebody may write to it."""
        self.kept[name] = value.detach().clone()


class Gradients:
    """Keeps what a backward pass finds for the values of a forward pass, by node name.

    Where an operator gives the very tensor that it was given, the two have one gradient, which is kept for the first.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self._watched: dict[int, Tensor] = {}  # by identity, which they keep as long as they are here

    def __call__(self, name: str, value: Tensor) -> None:
        """Watch for the gradient of one."""
        if not value.requires_grad or id(value) in self._watched:
            return

        def keep(gradient: Tensor) -> None:
            self.kept[name] = gradient.detach().clone()

        self._watched[id(value)] = value
        value.register_hook(keep)


@dataclass
class _Tracer(StageRunner):
    """Runs a stage node by node and keeps every value; where there is a backward pass, its gradient."""

    trace: Trace = field(kw_only=True)
    looks: dict[int, Gradients] = field(default_factory=dict)

    def forward(self, microbatch: int, values: Mapping[str, Tensor], leaves: Sequence[Any], part: Part) -> Live:
        """As the stage's own, one node at a time."""
        self.trace.weights[microbatch], self.trace.samples[microbatch] = part.weight, part.samples
        backward = torch.is_grad_enabled()
        inputs = {n: x.requires_grad_() if backward and n in self.gradients else x for n, x in values.items()}
        look = Gradients() if backward else Values()
        result = values_of(self, inputs, leaves, part, look)
        count = len(self.code.outputs)
        live = Live(inputs, dict(zip(self.code.outputs, result[:count], strict=True)), tuple(result[count:]))
        if isinstance(look, Gradients):
            self.live[microbatch], self.looks[microbatch] = live, look
        else:
            self._keep(microbatch, look.kept)
        return live

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None) -> dict[str, Tensor]:
        """As the stage's own."""
        result = super().backward(microbatch, gradients, seed)
        self._keep(microbatch, self.looks.pop(microbatch).kept)
        return result

    def _keep(self, microbatch: int, found: Mapping[str, Tensor]) -> None:
        self.trace.values |= {(microbatch, name): value for name, value in found.items()}


def trace(prepared: Prepared, world: World, batch: Any, seed: int, step: int = 0, backward: bool = False) -> Trace:
    """A pass in training mode over one whole batch, that of a step, on every worker of the plan.

    Args:
        prepared, world: of this worker.
        batch, seed, step: of which step.
        backward: gradients of values are kept instead of values; those of parameters are summed, and not used.
    """
    role = TrainingRole(prepared, world, example=batch, seed=seed)
    partition, plan = prepared.main, prepared.plan
    if backward:
        programs = programs_of(partition, plan, holders_of(prepared), True, prepared.layouts_of(partition))
    else:
        programs = lower_evaluation(partition, plan)
    whole = Batch.whole(batch)
    worker = role.lane(partition, programs, whole.samples).worker
    runner = worker.runner
    replica = 0 if "data" in worker.mesh.axes else worker.program.replica
    own = Trace(worker.program.stage, replica, worker.mesh.coordinates)
    same = (runner.code, runner.tensors, runner.gradients, runner.device, runner.autocast, runner.local)
    worker.runner = _Tracer(*same, codes=runner.codes, trace=own)
    with torch.set_grad_enabled(backward), own_calls():
        worker.run(whole, step, seed, lambda state: None)
    role.close()
    return own
