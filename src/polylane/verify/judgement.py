"""Judgement of a plan's steps: every difference relative to its tensor's size and rounding, and which ones fail."""

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

# Computed by the optimizer, from the same gradient on both sides: no rounding floor applies to these.
UPDATED = (
    ComparedKind.UPDATE,
    ComparedKind.MEMORY,
)

Where = tuple[int, int]  # step from 0, and the replica of the reference


@dataclass(frozen=True)
class Judgement:
    """Relative errors of a training by a plan.

    Attributes:
        losses: relative error of the loss of each step.
        replicas: for each step and each replica of the reference (one where replicas share their weights): the largest
            error over the workers, by what was compared.
        state: errors of whole weights and buffers after the last step, as the plan gathers them, by name.
        undetermined: gradients and buffers that the reference itself does not determine, in any step.
    """

    losses: list[float]
    replicas: list[list[dict[What, float]]]
    state: Mapping[str, float]
    undetermined: Collection[tuple[ComparedKind, str]]

    @cached_property
    def errors(self) -> list[dict[What, float]]:
        """For each step, the largest error over all workers, by what was compared."""
        return [_largest_errors(each) for each in self.replicas]

    @property
    def worst(self) -> float:
        """The largest error of all, losses and final state included."""
        each = (error for errors in self.errors for error in errors.values())
        return max((*self.losses, *self.state.values(), *each), default=0.0)

    def error_of(self, kind: ComparedKind, name: str) -> float | None:
        """Return the worst error of one kind of one tensor over all steps; None where it was never compared."""
        found = [e for errors in self.errors for what, e in errors.items() if what[:2] == (kind, name)]
        return max(found, default=None)

    def first_wrong_step(self, tolerance: float) -> int | None:
        """Return the number of the first step in which anything differs, None where none does."""
        for step, errors in enumerate(self.errors):
            # "not <=" and not ">": a NaN must count as wrong.
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
    """Return the differences relative to sizes and rounding floors.

    Args:
        reference: the training that the workers were compared with.
        losses: the plan's losses, one for each step.
        workers: the absolute differences that each worker found.
        parameters: names of the weights; all others are buffers.
        tolerance: largest relative error that counts as rounding.
        more: floors that were measured over more tries, by step and replica; None: none were.
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
    # The loss of a step is one number over all replicas, and so it is judged by the largest of their floors.
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
    """Return the steps and replicas in which a loss, a gradient or a buffer fails: there the rounding floors matter."""
    found = set[Where]()
    for number, errors in enumerate(judgement.errors):
        rounded = (what for what, error in errors.items() if what[0] not in UPDATED and not error <= tolerance)
        if any(rounded) or not judgement.losses[number] <= tolerance:
            found |= {(number, replica) for replica, _ in _pair_with_reference(reference, number, workers)}
    # The gathered state is compared after the last step, whose floors judge it.
    if any(not error <= tolerance for error in judgement.state.values()):
        found.add((len(judgement.errors) - 1, 0))
    return found


def _pair_with_reference(
    reference: ReferenceRun, number: int, workers: Sequence[Distances]
) -> Iterator[tuple[int, list[Distances]]]:
    """Yield each replica of the reference's step with the workers that are compared with it."""
    count = len(reference.steps[number])
    for replica in range(count):
        # A reference of one replica is for all workers: modulo 1 every number is 0.
        yield replica, [worker for worker in workers if worker.replica % count == replica]


class _Scales:
    """The denominators of one step's relative errors.

    A weight is relative to the larger of its values before and after the update, for it is a sum of the old value and a
    change, and rounds like the larger of them. The same holds for running statistics.
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
        """Return the denominator for one compared quantity."""
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
    """Return the errors of the whole weights and buffers after the last step, by name.

    Replicas with weights of their own have averaged them by then: the scale is the largest that any replica had.
    """
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
