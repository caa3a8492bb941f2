"""Stepwise comparison: a plan trains each step from the reference's state, and every worker measures its distance.

Before a step every worker loads its part of the reference's weights, buffers and optimizer state, so that rounding does
not grow over the steps. Its optimizer gets the reference's gradient in the place of its own, once that has been
compared: the update is then one of the same gradient. Nothing is loaded before the first step: workers must start from
equal weights by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.rounding_noise import max_difference
from polylane.runtime.job import Job
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.sync.gradient_sync import LocalOptimizer
from polylane.verify.record import ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.training_state import Cut, memory_differences, tensor_differences, write_memory, write_tensors


class ComparedKind(StrEnum):
    """What of a step is compared."""

    GRADIENT = "gradient"  # as the plan computed it, reduced and clipped
    VALUE = "value"  # a weight after its update, a buffer after the pass
    UPDATE = "update"  # a weight after its update, before replicas with weights of their own average them
    MEMORY = "memory"  # an entry of the optimizer's state


What = tuple[ComparedKind, str, str]  # kind, parameter or buffer, key in the optimizer's state ("" for other kinds)


@dataclass
class Distances:
    """Absolute differences between one worker and the reference.

    Attributes:
        replica: the replica of the reference that the worker is compared with.
        losses: (total, count) of every step.
        steps: for each step, the largest difference of each compared quantity.
        state: differences of the whole model's weights and buffers after the last step, by name; on rank 0 alone.
    """

    replica: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    steps: list[dict[What, float]] = field(default_factory=list)
    state: dict[str, float] = field(default_factory=dict)

    def record_distance(self, step: int, quantity: What, distance: float) -> None:
        """Keep the largest distance of a quantity in a step."""
        distances = self.steps[step]
        distances[quantity] = max(distances.get(quantity, 0.0), distance)

    def record_tensors(
        self, step: int, kind: ComparedKind, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], cut: Cut
    ) -> None:
        """Keep how far a worker's tensors are from the parts of the expected ones that ``cut`` gives."""
        for name, distance in tensor_differences(expected, tensors, cut):
            self.record_distance(step, (kind, name, ""), distance)


class WorkerParts:
    """Which part of a whole tensor a worker holds: for its passes, and for its optimizer.

    The two differ under ZeRO-1 and -2 (whole weights, a shard of the optimizer's state) and on parameter servers.

    Args:
        job: the worker's part in the training.
        prepared: the training, compiled for the plan.
    """

    def __init__(self, job: Job, prepared: CompiledTraining) -> None:
        plan, rank = prepared.plan, job.world.rank
        self._job, self._is_server = job, plan.sync.has_servers
        self._keeps_only_shards = plan.sync.shard == "parameters"
        self._shard_spec = ShardSpec(prepared, rank) if rank < plan.workers else None

    def local_part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the part of a weight or buffer that this worker keeps up to date, None for none of it."""
        if self._shard_spec is None:
            return tensor
        shard = self._shard_spec.local_shard(name, tensor)
        return self._job.worker.shard_of(name, shard) if self._keeps_only_shards else shard

    def optimizer_part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the part of a parameter that this worker's optimizer updates; a parameter server has all of it."""
        if self._is_server or self._shard_spec is None:
            return tensor
        return self._job.worker.shard_of(name, self._shard_spec.local_shard(name, tensor))


def train_stepwise(job: Job, training: ComparedTraining, reference: ReferenceRun) -> Distances:
    """Train one worker's part, each step from the reference's state, and return its distances.

    Called on every process of the plan, parameter servers included, for the barriers in it are collective.
    """
    plan, rank = job.plan, job.world.rank
    replica = plan.stage_and_replica(rank)[1] if rank < plan.workers else 0
    parts, distances = WorkerParts(job, training.prepared), Distances(replica)
    # Gradients can be compared only where they are complete, reduced and clipped: at the optimizer's step itself.
    for local_optimizer in job.worker.stepping():
        _compare_before_step(local_optimizer, reference, parts, distances)
    for number, batch in enumerate(training.batches):
        distances.steps.append({})
        step = reference.step_of(number, replica)
        if number:
            _load_reference_state(job, step, parts)
        # A barrier: a server must not get gradients before it has loaded the reference's state.
        job.gathered(None)
        distances.losses.append(job.step(batch).sums)
        gradients = job.whole_gradients()
        # A barrier: a server's weights are compared below, after its last update of this step.
        job.gathered(None)
        # Rank 0 alone receives whole gradients; parameters without a gradient on either side are found here.
        if rank == 0:
            for name, distance in gradient_distances(reference.step_of(number, 0).gradients, gradients):
                distances.record_distance(number, (ComparedKind.GRADIENT, name, ""), distance)
        expected = step.after.tensors
        distances.record_tensors(number, ComparedKind.VALUE, expected, job.worker.held(), parts.local_part)
        for local_optimizer in job.worker.stepping():
            distances.record_tensors(
                number, ComparedKind.VALUE, expected, local_optimizer.parameters, parts.optimizer_part
            )
            for name, key, distance in memory_differences(
                step.after, local_optimizer.optimizer, local_optimizer.parameters, parts.optimizer_part
            ):
                distances.record_distance(number, (ComparedKind.MEMORY, name, key), distance)
    state = job.state_dict()
    if rank == 0:
        distances.state = {name: max_difference(value, state[name]) for name, value in reference.state.items()}
    return distances


def _load_reference_state(job: Job, step: ReferenceStep, parts: WorkerParts) -> None:
    write_tensors(step.before.tensors, job.worker.held(), parts.local_part)
    for local_optimizer in job.worker.stepping():
        write_tensors(step.before.tensors, local_optimizer.parameters, parts.optimizer_part)
        write_memory(step.before, local_optimizer.optimizer, local_optimizer.parameters, parts.optimizer_part)


def gradient_distances(expected: Mapping[str, Tensor], got: Mapping[str, Tensor | None]) -> Iterator[tuple[str, float]]:
    """Yield how far whole gradients are from the expected ones, by name; a missing gradient counts as zero.

    Where None and zero lead to different updates (weight decay), the comparison of updates finds it.
    """
    for name in expected.keys() | got.keys():
        target, actual = expected.get(name), got.get(name)
        like = target if target is not None else actual
        if like is not None:
            zero = torch.zeros_like(like)
            yield name, max_difference(zero if target is None else target, zero if actual is None else actual)


def _compare_before_step(
    local_optimizer: LocalOptimizer, reference: ReferenceRun, parts: WorkerParts, distances: Distances
) -> None:
    """Wrap an optimizer's step: compare the gradients that it is to use, and give it the reference's instead."""
    plain = local_optimizer.optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        number = local_optimizer.count_updates()
        expected, cut = reference.step_of(number, distances.replica), parts.optimizer_part
        gradients = {
            name: parameter.grad
            for name, parameter in local_optimizer.parameters.items()
            if parameter.grad is not None and name in expected.gradients
        }
        distances.record_tensors(number, ComparedKind.GRADIENT, expected.gradients, gradients, cut)
        old_gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        # In place, since under ZeRO a gradient may be a view of a larger tensor.
        write_tensors(expected.gradients, gradients, cut)
        try:
            result = plain(*args, **kwargs)
        finally:
            for name, gradient in gradients.items():
                gradient.copy_(old_gradients[name])
        updated = {
            name: parameter for name, parameter in local_optimizer.parameters.items() if name in expected.updated
        }
        distances.record_tensors(number, ComparedKind.UPDATE, expected.updated, updated, cut)
        return result

    # Torch's step hooks would not do: an optimizer of the user's own need not call the base class that has them.
    local_optimizer.optimizer.step = step  # type: ignore[method-assign]
