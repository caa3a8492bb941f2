"""The judgement over a plan's steps: every difference as a share of what it may be, and which of them fail."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.graph.rounding_noise import max_magnitude
from polylane.verify.record import ReferenceRun, ReferenceStep
from polylane.verify.relative_error import divide_by_scale, error_scale, is_determined
from polylane.verify.rounding_floor import RoundingFloors
from polylane.verify.stepwise import ComparedKind, Distances, What
from polylane.verify.training_state import measure_memory_sizes

UPDATED = (
    ComparedKind.UPDATE,
    ComparedKind.MEMORY,
)  # by the optimizer, given the same gradient: no sums are rounded otherwise

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
    undetermined: Collection[tuple[ComparedKind, str]]

    @cached_property
    def errors(self) -> list[dict[What, float]]:
        """Of every step, by what was compared; the worst of all workers."""
        return [_largest_errors(each) for each in self.replicas]

    @property
    def worst(self) -> float:
        """The largest error of all."""
        each = (error for errors in self.errors for error in errors.values())
        return max((*self.losses, *self.state.values(), *each), default=0.0)

    def error_of(self, kind: ComparedKind, name: str) -> float | None:
        """The worst error of one thing over all steps; None where it was never compared."""
        found = [e for errors in self.errors for what, e in errors.items() if what[:2] == (kind, name)]
        return max(found, default=None)

    def first_wrong_step(self, tolerance: float) -> int | None:
        """The first step in which anything differs."""
        for step, errors in enumerate(self.errors):
            if not self.losses[step] <= tolerance or any(not error <= tolerance for error in errors.values()):
                return step
        return None


def judge_differences(
    reference: ReferenceRun,
    losses: Sequence[float],
    workers: Sequence[Distances],
    parameters: Collection[str],
    tolerance: float,
    more: Mapping[Where, RoundingFloors] | None = None,
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
    replicas, undetermined = list[list[dict[What, float]]](), set[tuple[ComparedKind, str]]()
    for number in range(len(losses)):
        replicas.append([])
        for replica, each in _pair_with_reference(reference, number, workers):
            step = reference.step_of(number, replica)
            scales = _Scales(step, _floors_of_step(step, more, (number, replica)), parameters, tolerance)
            undetermined |= scales.undetermined
            own = [
                {w: divide_by_scale(distance, scales.scale_of(w)) for w, distance in x.steps[number].items()}
                for x in each
            ]
            replicas[-1].append(_largest_errors(own))
    pairs = enumerate(zip(reference.losses, losses, strict=True))
    return Judgement(
        [
            divide_by_scale(_nan_as_infinity(abs(a - b)), _scale_of_loss(reference, n, a, more, tolerance))
            for n, (a, b) in pairs
        ],
        replicas,
        _errors_of_state(reference, workers[0].state, parameters, tolerance, more),
        undetermined,
    )


def _largest_errors(each: Iterable[Mapping[What, float]]) -> dict[What, float]:
    found: dict[What, float] = {}
    for errors in each:
        found |= {what: max(found.get(what, 0.0), error) for what, error in errors.items()}
    return found


def find_wrong_steps(
    reference: ReferenceRun, workers: Sequence[Distances], judgement: Judgement, tolerance: float
) -> set[Where]:
    """Where the floors matter: steps in which a loss, a gradient or a buffer fails."""
    found = set[Where]()
    for number, errors in enumerate(judgement.errors):
        rounded = (what for what, error in errors.items() if what[0] not in UPDATED and not error <= tolerance)
        if any(rounded) or not judgement.losses[number] <= tolerance:
            found |= {(number, replica) for replica, _ in _pair_with_reference(reference, number, workers)}
    if any(not error <= tolerance for error in judgement.state.values()):
        found.add((len(judgement.errors) - 1, 0))
    return found


def _pair_with_reference(
    reference: ReferenceRun, number: int, workers: Sequence[Distances]
) -> Iterator[tuple[int, list[Distances]]]:
    """The workers that are held against the same step of the reference."""
    count = len(reference.steps[number])
    for replica in range(count):
        yield replica, [worker for worker in workers if worker.replica % count == replica]


class _Scales:
    """What the differences of one step are relative to.

    An update is made of what there was before it: its rounding is as large as that. So for running statistics.
    """

    def __init__(
        self, step: ReferenceStep, floors: RoundingFloors, parameters: Collection[str], tolerance: float
    ) -> None:
        self._step, self._floors, self._tolerance = step, floors, tolerance
        self._parameters = parameters
        self._memories = measure_memory_sizes(step.before, step.after)
        gradients = {name: max_magnitude(gradient) for name, gradient in step.gradients.items()}
        buffers = {n: max_magnitude(tensor) for n, tensor in step.after.tensors.items() if n not in parameters}
        self.undetermined = {
            *(
                (ComparedKind.GRADIENT, n)
                for n, s in gradients.items()
                if not is_determined(s, floors.gradients.get(n, 0.0))
            ),
            *((ComparedKind.VALUE, n) for n, s in buffers.items() if not is_determined(s, floors.buffers.get(n, 0.0))),
        }
        self._gradients = gradients

    def scale_of(self, what: What) -> float:
        """The scale of one thing."""
        kind, name, key = what
        if kind is ComparedKind.MEMORY:
            return self._memories.get((name, key), 0.0)
        if kind is ComparedKind.GRADIENT:
            floor = self._floors.gradients.get(name, 0.0)
            return error_scale(self._gradients.get(name, 0.0), floor, self._tolerance)
        own = max(max_magnitude(state.tensors[name]) for state in (self._step.before, self._step.after))
        floor = 0.0 if name in self._parameters else self._floors.buffers.get(name, 0.0)
        return error_scale(own, floor, self._tolerance)


def _floors_of_step(step: ReferenceStep, more: Mapping[Where, RoundingFloors] | None, where: Where) -> RoundingFloors:
    return step.floors.elementwise_max(more[where]) if more and where in more else step.floors


def _scale_of_loss(
    reference: ReferenceRun, number: int, loss: float, more: Mapping[Where, RoundingFloors] | None, tolerance: float
) -> float:
    each = [_floors_of_step(step, more, (number, replica)) for replica, step in enumerate(reference.steps[number])]
    return error_scale(abs(loss), max(floors.loss for floors in each), tolerance)


def _errors_of_state(
    reference: ReferenceRun,
    distances: Mapping[str, float],
    parameters: Collection[str],
    tolerance: float,
    more: Mapping[Where, RoundingFloors] | None,
) -> dict[str, float]:
    """Of whole weights and buffers, which replicas that trained apart agree on."""
    last = reference.steps[-1]
    floors = [_floors_of_step(step, more, (len(reference.steps) - 1, replica)) for replica, step in enumerate(last)]
    found = {}
    for name, distance in distances.items():
        states = (state.tensors[name] for step in last for state in (step.before, step.after) if name in state.tensors)
        own = max((*map(max_magnitude, states), max_magnitude(reference.state[name])))
        floor = 0.0 if name in parameters else max(each.buffers.get(name, 0.0) for each in floors)
        found[name] = divide_by_scale(distance, error_scale(own, floor, tolerance))
    return found


def _nan_as_infinity(error: float) -> float:
    return error if error == error else math.inf
