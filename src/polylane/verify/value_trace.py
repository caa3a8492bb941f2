"""Value trace: a pass by a plan in which every worker keeps all its values or their gradients, to find a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from polylane.compile.sample_shares import Batch
from polylane.graph.interpreter import ObservingInterpreter
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.runtime.pipeline.bind_program import lower_programs
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.workers.world import World
from polylane.verify.record import ComparedTraining


@dataclass
class ValueTrace:
    """One worker's values of a pass.

    Attributes:
        stage: number of the worker's stage.
        replica: number of the worker's replica; 0 where replicas split operators as the axis "data" of a mesh.
        coordinates: place in the stage's mesh, by axis.
        values: (microbatch, node name) -> the value, or its gradient.
        weights: microbatch -> 1, or 0 where the worker computed on a padding sample, which does not count.
        samples: microbatch -> the number of samples that were computed on.
    """

    stage: int
    replica: int
    coordinates: Mapping[str, int]
    values: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)


class KeptValues:
    """Callback that keeps the values of a forward pass, or their gradients, by node name.

    Where an operator returns its own input, both nodes have one gradient, which is kept for the first.

    Args:
        gradients: whether gradients are kept, which come in the backward pass; else values.
    """

    def __init__(self, gradients: bool) -> None:
        self.values: dict[str, Tensor] = {}
        self._gradients = gradients
        self._watched_values: dict[int, Tensor] = {}  # by id, which nothing else gets while the tensor is kept here

    def __call__(self, name: str, value: Tensor) -> None:
        """Keep a copy of a value as it is now, since a later operator may write to it; or hook into its gradient."""
        if not self._gradients:
            self.values[name] = value.detach().clone()
            return
        if not value.requires_grad or id(value) in self._watched_values:
            return

        def keep(gradient: Tensor) -> None:
            self.values[name] = gradient.detach().clone()

        self._watched_values[id(value)] = value
        value.register_hook(keep)


@dataclass
class _TracingRunner(StageRunner):
    """Stage runner that runs node by node and keeps every value, or in a backward pass every value's gradient."""

    trace: ValueTrace = field(kw_only=True)
    kept_gradients: dict[int, KeptValues] = field(default_factory=dict)

    def run_code(self, inputs: Mapping[str, Tensor], leaves: Sequence[Any], part: SampleSlice) -> tuple[Any, ...]:
        self.trace.weights[part.microbatch], self.trace.samples[part.microbatch] = part.weight, part.samples
        kept_values, code = KeptValues(torch.is_grad_enabled()), self.code_for(part.samples)
        roles = iter(code.roles)

        def observe(node: fx.Node, value: Any) -> None:
            if isinstance(value, Tensor) and node.meta.get("stands", True):
                kept_values(node.meta["name"], value)

        interpreter = ObservingInterpreter(
            code.graph, lambda node: self.resolve_argument(next(roles), inputs, leaves, part), observe
        )
        result = tuple(interpreter.run())
        if torch.is_grad_enabled():
            self.kept_gradients[part.microbatch] = kept_values
        else:
            self._keep_values(part.microbatch, kept_values)
        return result

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None) -> dict[str, Tensor]:
        result = super().backward(microbatch, gradients, seed)
        self._keep_values(microbatch, self.kept_gradients.pop(microbatch))
        return result

    def backward_input(
        self, microbatch: int, gradients: Mapping[str, Tensor], seed: Tensor | None
    ) -> dict[str, Tensor]:
        result = super().backward_input(microbatch, gradients, seed)
        self._keep_values(microbatch, self.kept_gradients.pop(microbatch))
        return result

    def _keep_values(self, microbatch: int, kept_values: KeptValues) -> None:
        self.trace.values |= {(microbatch, name): value for name, value in kept_values.values.items()}


def trace_pass(training: ComparedTraining, world: World, step: int, backward: bool) -> ValueTrace:
    """Run a pass in training mode over one whole batch and return this worker's values; called on every worker.

    Args:
        training: the training that is compared, compiled for the plan.
        world: the process group of all workers.
        step: number of the step, for its batch and its random numbers.
        backward: keep the gradients of values instead of values; those of parameters are summed, and not used.
    """
    prepared, batch = training.prepared, training.batches[step]
    role = TrainingRole(prepared, world, example=batch, seed=training.seed)
    programs = lower_programs(prepared, prepared.main, training=backward)
    whole_batch = Batch.whole(batch)
    worker = role.bind_programs(programs, whole_batch.samples).executor
    replica = 0 if "data" in worker.mesh.axes else worker.program.replica
    trace = ValueTrace(worker.program.stage, replica, worker.mesh.coordinates)
    # The same stage code on the same tensors, so that what is traced is what training runs.
    worker.runners = {stage: _TracingRunner(**vars(runner), trace=trace) for stage, runner in worker.runners.items()}
    with torch.set_grad_enabled(backward), allow_own_calls():
        worker.run(whole_batch, step, training.seed, lambda state: None)
    role.close()
    return trace
