"""What differs in a step: gradients, updates, buffers, or the averages that replicas with their own weights load."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polylane.verify.first_difference import StepDifference
from polylane.verify.judgement import Judgement
from polylane.verify.stepwise import ComparedKind, What


def wrong_of_replica(
    judgement: Judgement, number: int, parameters: Collection[str], tolerance: float
) -> StepDifference:
    """Return what differs in a step where replicas have weights of their own, for the first replica with a difference.

    Weights that are right after the update and wrong after the step are wrong averages.
    """
    each = judgement.replicas[number]
    differ = [{what for what, error in errors.items() if not error <= tolerance} for errors in each]
    replica = next((number for number, found in enumerate(differ) if found), None)
    if replica is None:
        return wrong_in_step(judgement, number, parameters, tolerance)
    wrong = differ[replica]
    names = {kind: {name for own, name, _ in wrong if own is kind} for kind in ComparedKind}
    weights = names[ComparedKind.VALUE] & set(parameters)
    updated = any(kind is ComparedKind.UPDATE for kind, *_ in each[replica])
    averaged = weights - names[ComparedKind.UPDATE] if updated else set()
    buffers = names[ComparedKind.VALUE] - set(parameters)
    return replace(
        wrong_in_step(judgement, number, parameters, tolerance, wrong),
        updates=names[ComparedKind.UPDATE] if updated else weights,
        buffers=() if averaged else buffers,  # they are averaged with the weights
        averaged=averaged | buffers if averaged else (),
        replica=replica if len(each) > 1 else None,
    )


def wrong_in_state(judgement: Judgement, tolerance: float) -> set[str]:
    """Return the names of weights and buffers that differ after the last step."""
    return {name for name, error in judgement.state.items() if not error <= tolerance}


def wrong_in_step(
    judgement: Judgement,
    number: int,
    parameters: Collection[str],
    tolerance: float,
    wrong: Collection[What] | None = None,
) -> StepDifference:
    """Return what differs in a step, over all workers.

    Args:
        judgement: has the error of every tensor in every step.
        number: number of the step, from 0.
        parameters: names of parameters, as opposed to buffers.
        tolerance: largest relative error that counts as rounding.
        wrong: what differs on one replica; None: whatever differs on any of them.
    """
    if wrong is None:
        wrong = {what for what, error in judgement.errors[number].items() if not error <= tolerance}
    values = {name for kind, name, _ in wrong if kind is ComparedKind.VALUE}
    return StepDifference(
        number,
        {name for kind, name, _ in wrong if kind is ComparedKind.GRADIENT},
        values - set(parameters),
        values & set(parameters),
        {name: key for kind, name, key in wrong if kind is ComparedKind.MEMORY},
        not judgement.losses[number] <= tolerance,
    )
