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

from polylane.graph.rounding import apart
from polylane.proof.record import Reference, Step
from polylane.proof.state import differences, memory_differences, put, remember
from polylane.runtime.job import Job
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import Prepared
from polylane.runtime.sync.rule import Stepping


class Kind(StrEnum):
    """What of a step is compared."""

    GRADIENT = "gradient"  # as the plan computed it, reduced and clipped
    VALUE = "value"  # of a weight after its update, of a buffer after the pass
    UPDATE = "update"  # of a weight after its update, before replicas that go apart agree on another one
    MEMORY = "memory"  # of the optimizer


What = tuple[Kind, str, str]  # of which parameter or buffer, and which entry of an optimizer's state


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

    def note(self, step: int, what: What, distance: float) -> None:
        """Keep the largest."""
        seen = self.steps[step]
        seen[what] = max(seen.get(what, 0.0), distance)


class Parts:
    """What a worker has of whole tensors, as its passes see them and as it updates them.

    Args:
        job: the worker's.
        prepared: the training.
    """

    def __init__(self, job: Job, prepared: Prepared) -> None:
        plan, rank = prepared.plan, job.world.rank
        self._job, self._serves = job, plan.sync.serves
        self._hidden = plan.sync.shard == "parameters"
        stage = plan.place(rank)[0] if rank < plan.workers else 0
        self._pieces = Pieces(prepared, stage, plan.coordinates(rank)) if rank < plan.workers else None

    def held(self, name: str, whole: Tensor) -> Tensor | None:
        """Of what it keeps up to date."""
        if self._pieces is None:
            return whole
        own = self._pieces.local_shard(name, whole)
        return self._job.shard_of(name, own) if self._hidden else own

    def updated(self, name: str, whole: Tensor) -> Tensor | None:
        """Of what its optimizer has; a parameter server has all of it."""
        if self._serves or self._pieces is None:
            return whole
        return self._job.shard_of(name, self._pieces.local_shard(name, whole))


def train_stepwise(job: Job, prepared: Prepared, batches: Sequence[Any], reference: Reference) -> Distances:
    """One worker's part of a training, each step from the reference's state."""
    plan, rank = prepared.plan, job.world.rank
    replica = plan.place(rank)[1] if rank < plan.workers else 0
    parts, found = Parts(job, prepared), Distances(replica)
    for each in job.stepping():
        _watch(each, reference, parts, found)
    for number, batch in enumerate(batches):
        found.steps.append({})
        step = reference.at(number, replica)
        if number:
            _take_over(job, step, parts)
        job.gathered(None)  # all begin, servers too
        found.losses.append(job.step(batch).sums)
        gradients = job.whole_gradients()
        job.gathered(None)  # all have ended
        if rank == 0:
            for name, distance in _gradients_apart(reference.at(number, 0).gradients, gradients):
                found.note(number, (Kind.GRADIENT, name, ""), distance)
        for name, distance in differences(step.after, job.held(), parts.held):
            found.note(number, (Kind.VALUE, name, ""), distance)
        for each in job.stepping():
            for name, distance in differences(step.after, each.parameters, parts.updated):
                found.note(number, (Kind.VALUE, name, ""), distance)
            for name, key, distance in memory_differences(step.after, each.optimizer, each.parameters, parts.updated):
                found.note(number, (Kind.MEMORY, name, key), distance)
    state = job.state_dict()
    if rank == 0:
        found.state = {name: apart(value, state[name]) for name, value in reference.state.items()}
    return found


def _take_over(job: Job, step: Step, parts: Parts) -> None:
    put(step.before, job.held(), parts.held)
    for each in job.stepping():
        put(step.before, each.parameters, parts.updated)
        remember(step.before, each.optimizer, each.parameters, parts.updated)


def _gradients_apart(expected: Mapping[str, Tensor], got: Mapping[str, Tensor | None]) -> Iterator[tuple[str, float]]:
    """How far whole gradients are apart; none is as good as zero, for the update tells them apart."""
    for name in expected.keys() | got.keys():
        own, other = expected.get(name), got.get(name)
        like = own if own is not None else other
        if like is not None:
            zero = torch.zeros_like(like)
            yield name, apart(zero if own is None else own, zero if other is None else other)


def _watch(each: Stepping, reference: Reference, parts: Parts, found: Distances) -> None:
    """Compare the gradients that an optimizer is to take, and let it take the reference's."""
    plain = each.optimizer.step

    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        number = each.updates()
        expected = reference.at(number, found.replica).gradients
        for name, parameter in each.parameters.items():
            cut = None if parameter.grad is None or name not in expected else parts.updated(name, expected[name])
            if cut is not None and parameter.grad is not None:
                found.note(number, (Kind.GRADIENT, name, ""), apart(cut.view(parameter.grad.shape), parameter.grad))
        with _given(each, lambda name: parts.updated(name, expected[name]) if name in expected else None):
            result = plain(*args, **kwargs)
        updated = reference.at(number, found.replica).updated
        for name, parameter in each.parameters.items():
            cut = parts.updated(name, updated[name]) if name in updated else None
            if cut is not None:
                found.note(number, (Kind.UPDATE, name, ""), apart(cut.view(parameter.shape), parameter))
        return result

    each.optimizer.step = step  # type: ignore[method-assign]  # its hooks are not there where it calls no base class


class _given:
    """For a while, an optimizer's parameters have other gradients, where they have any; then their own again."""

    def __init__(self, each: Stepping, instead: Callable[[str], Tensor | None]) -> None:
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
