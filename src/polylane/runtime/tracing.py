"""One forward pass by a plan in which every worker keeps all its values, for finding where two runs part ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polylane.graph.part import Part
from polylane.program.lower import lower_evaluation
from polylane.runtime.division import Batch
from polylane.runtime.job import Job
from polylane.runtime.prepare import Prepared
from polylane.runtime.stage import Live, StageRunner, values_of
from polylane.runtime.stale import own_calls
from polylane.runtime.world import World


@dataclass
class Trace:
    """One worker's values of a forward pass: (microbatch, node name) -> value."""

    replica: int
    coordinates: Mapping[str, int]
    values: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)


class _Tracer(StageRunner):
    """Runs a stage node by node and keeps every value."""

    trace: Trace

    def forward(self, microbatch: int, values: Mapping[str, Tensor], leaves: Sequence[Any], part: Part) -> Live:
        """As the stage's own, one node at a time."""
        seen, result = values_of(self, values, leaves, part)
        self.trace.values |= {(microbatch, name): value for name, value in seen.items()}
        self.trace.weights[microbatch], self.trace.samples[microbatch] = part.weight, part.samples
        count = len(self.code.outputs)
        return Live({}, dict(zip(self.code.outputs, result[:count], strict=True)), tuple(result[count:]))


def trace(prepared: Prepared, world: World, batch: Any, seed: int, step: int = 0) -> Trace:
    """A forward pass in training mode over one whole batch, that of a step, on every worker of the plan."""
    job = Job(prepared, world, example=batch, seed=seed)
    programs = lower_evaluation(prepared.main, prepared.plan)
    worker = job.lane(prepared.main, programs).worker
    runner = worker.runner
    tracer = _Tracer(runner.code, runner.tensors, runner.gradients, runner.device, runner.autocast, runner.local)
    tracer.trace = Trace(0 if "data" in worker.mesh.axes else worker.program.replica, worker.mesh.coordinates)
    worker.runner = tracer
    with torch.no_grad(), own_calls():
        worker.run(Batch.whole(batch), step, seed, lambda state: None)
    job.close()
    return tracer.trace
