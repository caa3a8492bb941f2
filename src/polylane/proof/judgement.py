"""The judgement over a plan's steps: every difference as a share of what it may be, and which of them fail."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.graph.rounding import size
from polylane.proof.record import Reference, Step
from polylane.proof.relative import determined, over, scale_of
from polylane.proof.rounding import Floors
from polylane.proof.state import memory_sizes
from polylane.proof.stepwise import Distances, Kind, What

UPDATED = (Kind.UPDATE, Kind.MEMORY)  # by the optimizer, given the same gradient: no sums are rounded otherwise

Where = tuple[int, int]  # a step, and the replica whose reference it is


@dataclass(frozen=True)
class Judgement:
    """Relative errors of a training.

    Attributes:
        losses: of every step.
        replicas: of every step, of each replica that goes apart from the others or of all of them as one: by what was
            compared, the worst of its workers.
        state: of weights and buffers after the last step, as the plan puts them together.
        undetermined: gradients and buffers that the reference itself does not know, in any step.
    """

    losses: list[float]
    replicas: list[list[dict[What, float]]]
    state: Mapping[str, float]
    undetermined: Collection[tuple[Kind, str]]

    @cached_property
    def errors(self) -> list[dict[What, float]]:
        """Of every step, by what was compared; the worst of all workers."""
        return [_worst(each) for each in self.replicas]

    @property
    def worst(self) -> float:
        """The largest error of all."""
        each = (error for errors in self.errors for error in errors.values())
        return max((*self.losses, *self.state.values(), *each), default=0.0)

    def of(self, kind: Kind, name: str) -> float | None:
        """The worst error of one thing over all steps; None where it was never compared."""
        found = [e for errors in self.errors for what, e in errors.items() if what[:2] == (kind, name)]
        return max(found, default=None)

    def first_wrong(self, tolerance: float) -> int | None:
        """The first step in which anything differs."""
        for step, errors in enumerate(self.errors):
            if not self.losses[step] <= tolerance or any(not error <= tolerance for error in errors.values()):
                return step
        return None


def judge(
    reference: Reference,
    losses: Sequence[float],
    workers: Sequence[Distances],
    parameters: Collection[str],
    tolerance: float,
    more: Mapping[Where, Floors] | None = None,
) -> Judgement:
    """Hold differences against sizes and floors.

    Args:
        reference: what was compared with.
        losses: of the plan, one a step.
        workers: what each of them found.
        parameters: names of the weights; all others are buffers.
        tolerance: largest relative error that counts as rounding.
        more: floors that were measured again, by step and replica.
    """
    replicas, undetermined = list[list[dict[What, float]]](), set[tuple[Kind, str]]()
    for number in range(len(losses)):
        replicas.append([])
        for replica, each in _by_replica(reference, number, workers):
            step = reference.at(number, replica)
            scales = _Scales(step, _floors(step, more, (number, replica)), parameters, tolerance)
            undetermined |= scales.undetermined
            own = [{w: over(distance, scales.of(w)) for w, distance in x.steps[number].items()} for x in each]
            replicas[-1].append(_worst(own))
    pairs = enumerate(zip(reference.losses, losses, strict=True))
    return Judgement(
        [over(_nan_last(abs(a - b)), _loss_scale(reference, n, a, more, tolerance)) for n, (a, b) in pairs],
        replicas,
        _state_errors(reference, workers[0].state, parameters, tolerance, more),
        undetermined,
    )


def _worst(each: Iterable[Mapping[What, float]]) -> dict[What, float]:
    found: dict[What, float] = {}
    for errors in each:
        found |= {what: max(found.get(what, 0.0), error) for what, error in errors.items()}
    return found


def wrong_steps(
    reference: Reference, workers: Sequence[Distances], judgement: Judgement, tolerance: float
) -> set[Where]:
    """Where the floors matter: steps in which a loss, a gradient or a buffer fails."""
    found = set[Where]()
    for number, errors in enumerate(judgement.errors):
        rounded = (what for what, error in errors.items() if what[0] not in UPDATED and not error <= tolerance)
        if any(rounded) or not judgement.losses[number] <= tolerance:
            found |= {(number, replica) for replica, _ in _by_replica(reference, number, workers)}
    if any(not error <= tolerance for error in judgement.state.values()):
        found.add((len(judgement.errors) - 1, 0))
    return found


def _by_replica(
    reference: Reference, number: int, workers: Sequence[Distances]
) -> Iterator[tuple[int, list[Distances]]]:
    """The workers that are held against the same step of the reference."""
    count = len(reference.steps[number])
    for replica in range(count):
        yield replica, [worker for worker in workers if worker.replica % count == replica]


class _Scales:
    """What the differences of one step are relative to.

    An update is made of what there was before it: its rounding is as large as that. So for running statistics.
    """

    def __init__(self, step: Step, floors: Floors, parameters: Collection[str], tolerance: float) -> None:
        self._step, self._floors, self._tolerance = step, floors, tolerance
        self._parameters = parameters
        self._memories = memory_sizes(step.before, step.after)
        gradients = {name: size(gradient) for name, gradient in step.gradients.items()}
        buffers = {n: size(tensor) for n, tensor in step.after.tensors.items() if n not in parameters}
        self.undetermined = {
            *((Kind.GRADIENT, n) for n, s in gradients.items() if not determined(s, floors.gradients.get(n, 0.0))),
            *((Kind.VALUE, n) for n, s in buffers.items() if not determined(s, floors.buffers.get(n, 0.0))),
        }
        self._gradients = gradients

    def of(self, what: What) -> float:
        """The scale of one thing."""
        kind, name, key = what
        if kind is Kind.MEMORY:
            return self._memories.get((name, key), 0.0)
        if kind is Kind.GRADIENT:
            floor = self._floors.gradients.get(name, 0.0)
            return scale_of(self._gradients.get(name, 0.0), floor, self._tolerance)
        own = max(size(state.tensors[name]) for state in (self._step.before, self._step.after))
        floor = 0.0 if name in self._parameters else self._floors.buffers.get(name, 0.0)
        return scale_of(own, floor, self._tolerance)


def _floors(step: Step, more: Mapping[Where, Floors] | None, where: Where) -> Floors:
    return step.floors.max(more[where]) if more and where in more else step.floors


def _loss_scale(
    reference: Reference, number: int, loss: float, more: Mapping[Where, Floors] | None, tolerance: float
) -> float:
    each = [_floors(step, more, (number, replica)) for replica, step in enumerate(reference.steps[number])]
    return scale_of(abs(loss), max(floors.loss for floors in each), tolerance)


def _state_errors(
    reference: Reference,
    distances: Mapping[str, float],
    parameters: Collection[str],
    tolerance: float,
    more: Mapping[Where, Floors] | None,
) -> dict[str, float]:
    """Of whole weights and buffers, which replicas that trained apart agree on."""
    last = reference.steps[-1]
    floors = [_floors(step, more, (len(reference.steps) - 1, replica)) for replica, step in enumerate(last)]
    found = {}
    for name, distance in distances.items():
        states = (state.tensors[name] for step in last for state in (step.before, step.after) if name in state.tensors)
        own = max((*map(size, states), size(reference.state[name])))
        floor = 0.0 if name in parameters else max(each.buffers.get(name, 0.0) for each in floors)
        found[name] = over(distance, scale_of(own, floor, tolerance))
    return found


def _nan_last(error: float) -> float:
    return error if error == error else math.inf
