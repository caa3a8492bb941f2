"""Judgement of a plan's steps: every difference relative to its tensor's size and rounding, and what of them fails."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from polylane.graph.rounding_noise import max_magnitude
from polylane.verify.first_difference import StepDifference
from polylane.verify.record import ComparedTraining, ReferenceRun, ReferenceStep
from polylane.verify.rounding_floor import RoundingFloors, divide_by_scale, error_scale, is_determined
from polylane.verify.stepwise import ComparedKind, Distances, What
from polylane.verify.training_state import measure_memory_sizes

# Computed by the optimizer, from the same gradient on both sides: no rounding floor applies to these.
UPDATED = (ComparedKind.UPDATE, ComparedKind.MEMORY)

Where = tuple[int, int]  # step from 0, and the replica of the reference


@dataclass(frozen=True)
class Judgement:
    """Relative errors of a training by a plan.

    Attributes:
        training: the training that was compared, with its tolerance.
        losses: relative error of the loss of each step.
        replicas: for each step and each replica of the reference (one where replicas share their weights): the largest
            error over the workers, by what was compared.
        state: errors of whole weights and buffers after the last step, as the plan gathers them, by name.
        undetermined: gradients and buffers that the reference itself does not determine, in any step.
    """

    training: ComparedTraining
    losses: list[float]
    replicas: list[list[dict[What, float]]]
    state: Mapping[str, float]
    undetermined: Collection[tuple[ComparedKind, str]]

    @cached_property
    def errors(self) -> list[dict[What, float]]:
        """For each step, the largest error over all workers, by what was compared."""
        return [_largest_errors(replica_errors) for replica_errors in self.replicas]

    @property
    def worst(self) -> float:
        """The largest error of all, losses and final state included."""
        all_errors = (error for errors in self.errors for error in errors.values())
        return max((*self.losses, *self.state.values(), *all_errors), default=0.0)

    def error_of(self, kind: ComparedKind, name: str) -> float | None:
        """Return the worst error of one kind of one tensor over all steps; None where it was never compared."""
        tensor_errors = [e for errors in self.errors for what, e in errors.items() if what[:2] == (kind, name)]
        return max(tensor_errors, default=None)

    def is_wrong(self, error: float) -> bool:
        """Return whether an error is more than rounding; NaN is: hence "not <=" instead of ">"."""
        return not error <= self.training.tolerance

    def first_wrong_step(self) -> int | None:
        """Return the number of the first step in which anything differs, None where none does."""
        for step, errors in enumerate(self.errors):
            if any(map(self.is_wrong, (self.losses[step], *errors.values()))):
                return step
        return None

    def wrong_in_step(self, number: int, wrong: Collection[What] | None = None) -> StepDifference:
        """Return what differs in a step, over all workers.

        Args:
            number: number of the step, from 0.
            wrong: what differs on one replica; None: whatever differs on any of them.
        """
        if wrong is None:
            wrong = self._select_wrong(self.errors[number])
        values, parameters = _names_of(wrong, ComparedKind.VALUE), self.training.parameters
        return StepDifference(
            number,
            _names_of(wrong, ComparedKind.GRADIENT),
            values - parameters,
            values & parameters,
            {name: key for kind, name, key in wrong if kind is ComparedKind.MEMORY},
            self.is_wrong(self.losses[number]),
        )

    def wrong_of_replica(self, number: int) -> StepDifference:
        """Return what differs in a step where replicas have weights of their own, for the first one with a difference.

        Weights that are right after the update and wrong after the step are wrong averages.
        """
        replica_errors = self.replicas[number]
        differ = list(map(self._select_wrong, replica_errors))
        replica = next((number for number, quantities in enumerate(differ) if quantities), None)
        if replica is None:
            return self.wrong_in_step(number)
        difference = self.wrong_in_step(number, differ[replica])
        if not any(kind is ComparedKind.UPDATE for kind, *_ in replica_errors[replica]):
            averaged = set[str]()
        else:
            updates = _names_of(differ[replica], ComparedKind.UPDATE)
            averaged = {*difference.updates} - updates
            difference = replace(difference, updates=updates)
        if averaged:  # buffers are averaged with the weights
            difference = replace(difference, buffers=(), averaged={*averaged, *difference.buffers})
        return replace(difference, replica=replica if len(replica_errors) > 1 else None)

    def wrong_in_state(self) -> set[str]:
        """Return the names of weights and buffers that differ after the last step."""
        return {name for name, error in self.state.items() if self.is_wrong(error)}

    def _select_wrong(self, errors: Mapping[What, float]) -> set[What]:
        return {quantity for quantity, error in errors.items() if self.is_wrong(error)}


def _names_of(compared: Collection[What], kind: ComparedKind) -> set[str]:
    return {name for compared_kind, name, _ in compared if compared_kind is kind}


def judge_differences(
    training: ComparedTraining,
    reference: ReferenceRun,
    losses: Sequence[float],
    workers: Sequence[Distances],
    new_floors: Mapping[Where, RoundingFloors] | None = None,
) -> Judgement:
    """Return the differences relative to sizes and rounding floors.

    Args:
        training: the training that is compared.
        reference: the run that the workers were compared with.
        losses: the plan's losses, one for each step.
        workers: the absolute differences that each worker found.
        new_floors: floors that were measured over more tries, by step and replica; None: none were.
    """
    loss_errors, undetermined = list[float](), set[tuple[ComparedKind, str]]()
    replicas: list[list[dict[What, float]]] = []
    for number, (a, b) in enumerate(zip(reference.losses, losses, strict=True)):
        floors = _floors_of_replicas(reference, number, new_floors or {})
        # The loss of a step is one number over all replicas, and so it is judged by the largest of their floors.
        scale = error_scale(abs(a), max(replica_floors.loss for replica_floors in floors), training.tolerance)
        loss_errors.append(divide_by_scale(abs(a - b), scale))
        replicas.append([])
        for replica, replica_workers in _pair_with_reference(reference, number, workers):
            scales = _Scales(training, reference.step_of(number, replica), floors[replica])
            undetermined |= scales.undetermined
            worker_errors = [
                {w: divide_by_scale(distance, scales.scale_of(w)) for w, distance in x.steps[number].items()}
                for x in replica_workers
            ]
            replicas[-1].append(_largest_errors(worker_errors))
    state = _errors_of_state(training, reference, workers[0].state, new_floors or {})
    return Judgement(training, loss_errors, replicas, state, undetermined)


def _largest_errors(error_maps: Iterable[Mapping[What, float]]) -> dict[What, float]:
    largest: dict[What, float] = {}
    for errors in error_maps:
        largest |= {quantity: max(largest.get(quantity, 0.0), error) for quantity, error in errors.items()}
    return largest


def find_wrong_steps(reference: ReferenceRun, workers: Sequence[Distances], judgement: Judgement) -> set[Where]:
    """Return the steps and replicas in which a loss, a gradient or a buffer fails: there the rounding floors matter."""
    wrong_steps = set[Where]()
    for number, errors in enumerate(judgement.errors):
        rounded = [error for quantity, error in errors.items() if quantity[0] not in UPDATED]
        if any(map(judgement.is_wrong, (judgement.losses[number], *rounded))):
            wrong_steps |= {(number, replica) for replica, _ in _pair_with_reference(reference, number, workers)}
    # The gathered state is compared after the last step, whose floors judge it.
    if judgement.wrong_in_state():
        wrong_steps.add((len(judgement.errors) - 1, 0))
    return wrong_steps


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

    def __init__(self, training: ComparedTraining, step: ReferenceStep, floors: RoundingFloors) -> None:
        self._training, self._step, self._floors = training, step, floors
        self._memories = measure_memory_sizes(step.before, step.after)
        self._gradients = {name: max_magnitude(gradient) for name, gradient in step.gradients.items()}
        buffers = {n: max_magnitude(x) for n, x in step.after.tensors.items() if n not in training.parameters}
        self.undetermined = {
            (kind, name)
            for kind, sizes, floor_of in (
                (ComparedKind.GRADIENT, self._gradients, floors.gradients),
                (ComparedKind.VALUE, buffers, floors.buffers),
            )
            for name, size in sizes.items()
            if not is_determined(size, floor_of.get(name, 0.0))
        }

    def scale_of(self, quantity: What) -> float:
        """Return the denominator for one compared quantity."""
        kind, name, key = quantity
        if kind is ComparedKind.MEMORY:
            return self._memories.get((name, key), 0.0)
        if kind is ComparedKind.GRADIENT:
            floor = self._floors.gradients.get(name, 0.0)
            return error_scale(self._gradients.get(name, 0.0), floor, self._training.tolerance)
        magnitude = max(max_magnitude(state.tensors[name]) for state in (self._step.before, self._step.after))
        floor = 0.0 if name in self._training.parameters else self._floors.buffers.get(name, 0.0)
        return error_scale(magnitude, floor, self._training.tolerance)


def _floors_of_replicas(
    reference: ReferenceRun, number: int, new_floors: Mapping[Where, RoundingFloors]
) -> list[RoundingFloors]:
    """Return the floors of a step, one for each replica of the reference; ``new_floors`` has those of further tries."""
    return [
        step.floors.elementwise_max(new_floors.get((number, replica), step.floors))
        for replica, step in enumerate(reference.steps[number])
    ]


def _errors_of_state(
    training: ComparedTraining,
    reference: ReferenceRun,
    distances: Mapping[str, float],
    new_floors: Mapping[Where, RoundingFloors],
) -> dict[str, float]:
    """Return the errors of the whole weights and buffers after the last step, by name.

    Replicas with weights of their own have averaged them by then: the scale is the largest that any replica had.
    """
    records = reference.steps[-1]
    floors = _floors_of_replicas(reference, len(reference.steps) - 1, new_floors)
    errors = {}
    for name, distance in distances.items():
        states = (
            state.tensors[name] for step in records for state in (step.before, step.after) if name in state.tensors
        )
        magnitude = max((*map(max_magnitude, states), max_magnitude(reference.state[name])))
        floor = (
            0.0
            if name in training.parameters
            else max(replica_floors.buffers.get(name, 0.0) for replica_floors in floors)
        )
        errors[name] = divide_by_scale(distance, error_scale(magnitude, floor, training.tolerance))
    return errors
