"""Free runs: all steps of a training by a plan, and what they leave behind, against the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.graph.rounding import apart, size
from polylane.proof.culprit import Wrong, after_forward
from polylane.proof.record import Record, Reference
from polylane.proof.relative import determined, over, relative_error, scale_of
from polylane.proof.rounding import Pass
from polylane.proof.verdict import Comparison, Deviation, Free, nan_last
from polylane.runtime.job import Job
from polylane.runtime.prepare import Prepared
from polylane.runtime.sync.server_log import Update
from polylane.runtime.weights import digest

LOSSES = ""  # stands for the losses among parameters and buffers: none of them has that name


@dataclass(frozen=True)
class FreeRun:
    """What a plan leaves behind on one worker.

    Attributes:
        record: losses, gradients and state; the latter two on the first worker alone.
        held: a digest of every part of a weight or buffer that it holds.
        updates: of every parameter server.
    """

    record: Record
    held: dict[str, str]
    updates: tuple[tuple[Update, ...], ...]


def train_freely(job: Job, batches: Sequence[Any]) -> FreeRun:
    """Take one step on every batch, and gather what the training leaves behind; called on every worker."""
    sums, gradients = list[tuple[float, float]](), dict[str, Tensor | None]()
    for batch in batches:
        sums.append(job.step(batch).sums)
        if len(sums) == 1:
            whole = job.whole_gradients()
            gradients = whole if job.world.rank == 0 else {}
    job.gathered(None)  # all have ended, before anybody looks at what a server holds
    trains = job.world.rank < job.plan.workers
    own = f" of replica {job.plan.place(job.world.rank)[1]}" if job.plan.sync.alone and trains else ""
    held = {name + job.part_of(name) + own: digest(tensor) for name, tensor in job.held().items()}
    losses = _whole_losses(job, sums)
    state = job.state_dict()
    return FreeRun(Record(losses, gradients, state if job.world.rank == 0 else {}), held, job.updates())


def _whole_losses(job: Job, sums: Sequence[tuple[float, float]]) -> list[float]:
    """The loss of every step over all replicas, of which each may know its own only."""
    plan = job.plan
    if not (plan.sync.serves and plan.sync.alone):
        return [total / count for total, count in sums]
    every = job.gathered(sums)
    ranks = {plan.place(rank)[1]: rank for rank in range(plan.workers)}.values()
    each = [zip(*(every[rank][step] for rank in ranks), strict=True) for step in range(len(sums))]
    return [sum(totals) / sum(counts) for totals, counts in each]


def compare_freely(reference: Reference, trained: FreeRun) -> Free:
    """How far a free run ends from the reference."""
    pairs = zip(reference.losses, trained.record.losses, strict=True)
    loss_error = max(over(nan_last(abs(a - b)), abs(a)) for a, b in pairs)
    errors = {name: relative_error(value, trained.record.state[name]) for name, value in reference.state.items()}
    name = max(errors, key=lambda each: errors[each], default="")
    worst = errors.get(name, 0.0)
    return Free(loss_error, worst, name if worst else "")


def as_pass(run: Record) -> Pass:
    """A whole run in the place of a step: gradients are of the first one, losses of all of them a tensor."""
    gradients = {name: gradient for name, gradient in run.gradients.items() if gradient is not None}
    return Pass(0.0, gradients, {**run.state, LOSSES: torch.tensor(run.losses, dtype=torch.float64)})


def compare_runs(reference: Reference, workers: Sequence[FreeRun], prepared: Prepared, tolerance: float) -> Comparison:
    """A whole run against a whole run."""
    floors, first = reference.floors, workers[0].record
    scales = [scale_of(abs(loss), floors.buffers.get(LOSSES, 0.0), tolerance) for loss in reference.losses]
    pairs = [zip(reference.losses, worker.record.losses, scales, strict=True) for worker in workers]
    errors = [
        max(each) for each in zip(*([over(nan_last(abs(a - b)), s) for a, b, s in p] for p in pairs), strict=True)
    ]
    loss_error = max(errors)
    deviations, undetermined = list[Deviation](), list[str]()
    for name, value in reference.state.items():
        if name in prepared.main.graph.tied or not value.numel():
            continue
        error, expected, got = None, reference.gradients.get(name), first.gradients.get(name)
        if expected is not None or got is not None:
            own, other = (torch.zeros_like(value) if each is None else each for each in (expected, got))
            floor = floors.gradients.get(name, 0.0)
            error = over(apart(own, other), scale_of(size(own), floor, tolerance))
            undetermined += [] if determined(size(own), floor) else [f"gradient of {name}"]
        floor = floors.buffers.get(name, 0.0)
        scale = scale_of(size(value), floor, tolerance)
        deviations.append(Deviation(name, error, over(apart(value, first.state[name]), scale)))
        undetermined += [] if determined(size(value), floor) else [name]
    return Comparison(
        reference=reference,
        losses=first.losses,
        loss_error=loss_error,
        deviations=tuple(deviations),
        held=[worker.held for worker in workers],
        worst=max((loss_error, *(each.worst for each in deviations))),
        culprit=_culprit_replayed(prepared, deviations, errors, tolerance),
        undetermined=tuple(undetermined),
    )


def _culprit_replayed(
    prepared: Prepared, deviations: Sequence[Deviation], losses: Sequence[float], tolerance: float
) -> str | None:
    """What differs first, where whole runs are compared: a gradient of the first step, a loss, a weight in the end."""
    gradients = {each.name for each in deviations if not (each.gradient or 0.0) <= tolerance}
    state = {each.name for each in deviations if not each.value <= tolerance}
    step = next((number for number, error in enumerate(losses) if not error <= tolerance), None)
    if gradients:
        return after_forward(prepared, Wrong(gradients=gradients))
    if step is not None:
        return f"step {step + 1}: the loss of all replicas is the first number that differs"
    return after_forward(prepared, Wrong(len(losses) - 1, averaged=state)) if state else None
