"""A plan's training step by step, each from the reference's state: how far every worker is from the reference.

Before a step every worker takes over its part of the weights, buffers and optimizer state that the reference had, so
that rounding does not grow over steps. Its optimizer is given the reference's gradient in the place of its own, which
has been compared by then: the update is that of the same gradient. Nothing is taken over before the first step: workers
must begin alike by themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from polylane.verify.record import ReferenceRun, ReferenceStep
from polylane.verify.training_state import memory_differences, tensor_differences, write_memory, write_tensors


class ComparedKind(StrEnum):
    """What of a step is compared."""

    GRADIENT = "gradient"  # as the plan computed it, reduced and clipped
    VALUE = "value"  # of a weight after its update, of a buffer after the pass
    UPDATE = "update"  # of a weight after its update, before replicas that go apart agree on another one
    MEMORY = "memory"  # of the optimizer


What = tuple[ComparedKind, str, str]  # of which parameter or buffer, and which entry of an optimizer's state


@dataclass
class Distances:
    """How far one worker is from the reference, absolute.

    Attributes:
        replica: whose reference it was held against.
        losses: (total, count) of every step.
        steps: of every step, the largest difference of everything that is compared.
        state: of the whole model's weights and buffers after the last step, at the worker that has them.
    """

    replica: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    steps: list[dict[What, float]] = field(default_factory=list)
    state: dict[str, float] = field(default_factory=dict)

    def record_distance(self, step: int, what: What, distance: float) -> None:
        """Keep the largest."""
        seen = self.steps[step]
        seen[what] = max(seen.get(what, 0.0), distance)


class WorkerParts:
    """What a worker has of whole tensors, as its passes see them and as it updates them.

    Args:
        job: the worker's.
        prepared: the training.
    """

    def __init__(self, job: Job, prepared: CompiledTraining) -> None:
        plan, rank = prepared.plan, job.world.rank
        self._job, self._is_server = job, plan.sync.has_servers
        self._keeps_only_shards = plan.sync.shard == "parameters"
        stage = plan.stage_and_replica(rank)[0] if rank < plan.workers else 0
        self._shard_spec = ShardSpec(prepared, stage, plan.coordinates(rank)) if rank < plan.workers else None

    def local_part(self, name: str, whole: Tensor) -> Tensor | None:
        """Of what it keeps up to date."""
        if self._shard_spec is None:
            return whole
        own = self._shard_spec.local_shard(name, whole)
        return self._job.shard_of(name, own) if self._keeps_only_shards else own

    def optimizer_part(self, name: str, whole: Tensor) -> Tensor | None:
        """Of what its optimizer has; a parameter server has all of it."""
        if self._is_server or self._shard_spec is None:
            return whole
        return self._job.shard_of(name, self._shard_spec.local_shard(name, whole))


def train_stepwise(job: Job, prepared: CompiledTraining, batches: Sequence[Any], reference: ReferenceRun) -> Distances:
    """One worker's part of a training, each step from the reference's state."""
    plan, rank = prepared.plan, job.world.rank
    replica = plan.stage_and_replica(rank)[1] if rank < plan.workers else 0
    parts, found = WorkerParts(job, prepared), Distances(replica)
    for each in job.stepping():
        _compare_before_step(each, reference, parts, found)
    for number, batch in enumerate(batches):
        found.steps.append({})
        step = reference.step_of(number, replica)
        if number:
            _load_reference_state(job, step, parts)
        job.gathered(None)  # all begin, servers too
        found.losses.append(job.step(batch).sums)
        gradients = job.whole_gradients()
        job.gathered(None)  # all have ended
        if rank == 0:
            for name, distance in _gradient_distances(reference.step_of(number, 0).gradients, gradients):
                found.record_distance(number, (ComparedKind.GRADIENT, name, ""), distance)
        for name, distance in tensor_differences(step.after, job.held(), parts.local_part):
            found.record_distance(number, (ComparedKind.VALUE, name, ""), distance)
        for each in job.stepping():
            for name, distance in tensor_differences(step.after, each.parameters, parts.optimizer_part):
                found.record_distance(number, (ComparedKind.VALUE, name, ""), distance)
            for name, key, distance in memory_differences(
                step.after, each.optimizer, each.parameters, parts.optimizer_part
            ):
                found.record_distance(number, (ComparedKind.MEMORY, name, key), distance)
    state = job.state_dict()
    if rank == 0:
        found.state = {name: max_difference(value, state[name]) for name, value in reference.state.items()}
    return found


def _load_reference_state(job: Job, step: ReferenceStep, parts: WorkerParts) -> None:
    write_tensors(step.before, job.held(), parts.local_part)
    for each in job.stepping():
        write_tensors(step.before, each.parameters, parts.optimizer_part)
        write_memory(step.before, each.optimizer, each.parameters, parts.optimizer_part)


def _gradient_distances(
    expected: Mapping[str, Tensor], got: Mapping[str, Tensor | None]
) -> Iterator[tuple[str, float]]:
    """How far whole gradients are apart; none is as good as zero, for the update tells them apart."""
    for name in expected.keys() | got.keys():
        own, other = expected.get(name), got.get(name)
        like = own if own is not None else other
        if like is not None:
            zero = torch.zeros_like(like)
            yield name, max_difference(zero if own is None else own, zero if other is None else other)


def _compare_before_step(each: LocalOptimizer, reference: ReferenceRun, parts: WorkerParts, found: Distances) -> None:
    """Compare the gradients that an optimizer is to take, and let it take the reference's."""
    plain = each.optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        number = each.count_updates()
        expected = reference.step_of(number, found.replica).gradients
        for name, parameter in each.parameters.items():
            cut = None if parameter.grad is None or name not in expected else parts.optimizer_part(name, expected[name])
            if cut is not None and parameter.grad is not None:
                found.record_distance(
                    number,
                    (ComparedKind.GRADIENT, name, ""),
                    max_difference(cut.view(parameter.grad.shape), parameter.grad),
                )
        with _SubstituteGradients(
            each, lambda name: parts.optimizer_part(name, expected[name]) if name in expected else None
        ):
            result = plain(*args, **kwargs)
        updated = reference.step_of(number, found.replica).updated
        for name, parameter in each.parameters.items():
            cut = parts.optimizer_part(name, updated[name]) if name in updated else None
            if cut is not None:
                found.record_distance(
                    number, (ComparedKind.UPDATE, name, ""), max_difference(cut.view(parameter.shape), parameter)
                )
        return result

    each.optimizer.step = step  # type: ignore[method-assign]  # its hooks are not there where it calls no base class


class _SubstituteGradients:
    """For a while, an optimizer's parameters have other gradients, where they have any; then their own again."""

    def __init__(self, each: LocalOptimizer, instead: Callable[[str], Tensor | None]) -> None:
        self._each, self._instead = each, instead
        self._own: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        for name, parameter in self._each.parameters.items():
            gradient = parameter.grad
            other = None if gradient is None else self._instead(name)
            if gradient is not None and other is not None:
                self._own.append((gradient, gradient.clone()))
                gradient.copy_(other.view(gradient.shape))

    def __exit__(self, *_: Any) -> None:
        for gradient, own in self._own:
            gradient.copy_(own)
