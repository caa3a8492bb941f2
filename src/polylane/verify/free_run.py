"""Free runs: all steps of a training by a plan, each from its own last state, compared with the reference's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.rounding_noise import max_difference, max_magnitude
from polylane.runtime.job import Job
from polylane.runtime.parameters.broadcast import digest_tensor
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate
from polylane.verify.first_difference import StepDifference, describe_later_difference
from polylane.verify.record import ComparedTraining, ReferenceRun, TrainingRecord
from polylane.verify.rounding_floor import MeasuredPass, divide_by_scale, error_scale, is_determined, relative_error
from polylane.verify.verdict import Comparison, Deviation, FreeRunDeviation

LOSSES = ""  # key of the losses among parameters and buffers; no tensor of a model has this name


@dataclass(frozen=True)
class FreeRun(TrainingRecord):
    """The results of a plan on one worker; gradients and state are those of rank 0 alone.

    Attributes:
        held: a digest of every local weight and buffer, by name and part.
        updates: what each parameter server recorded; empty without servers.
    """

    held: dict[str, str]
    updates: tuple[tuple[ServerUpdate, ...], ...]


def train_freely(job: Job, batches: Sequence[Any]) -> FreeRun:
    """Train one step on each batch and return the results; called on every process."""
    sums, gradients = list[tuple[float, float]](), dict[str, Tensor | None]()
    for batch in batches:
        sums.append(job.step(batch).sums)
        # Gradients of later steps are at weights that already differ by rounding. Asking for them would empty an
        # asynchronous pipeline.
        if len(sums) == 1 and not job.plan.is_asynchronous:
            whole_gradients = job.whole_gradients()
            gradients = whole_gradients if job.world.rank == 0 else {}
    job.gathered(None)  # a barrier: servers must have made their last update before their weights are read
    # Replicas of asynchronous servers differ on purpose: their digests are compared within a replica only.
    differs = job.plan.sync.is_replica_local and job.world.rank < job.plan.workers
    suffix = f" of replica {job.plan.stage_and_replica(job.world.rank)[1]}" if differs else ""
    digests = {
        name + job.worker.part_of(name) + suffix: digest_tensor(tensor) for name, tensor in job.worker.held().items()
    }
    losses = _whole_losses(job, sums)
    state = job.state_dict()
    return FreeRun(losses, gradients, state if job.world.rank == 0 else {}, digests, job.worker.updates())


def _whole_losses(job: Job, sums: Sequence[tuple[float, float]]) -> list[float]:
    """Return the loss of each step over all replicas; with asynchronous servers each replica has only its own."""
    plan = job.plan
    if not (plan.sync.has_servers and plan.sync.is_replica_local):
        return [total / count for total, count in sums]
    gathered_sums = job.gathered(sums)
    # One rank for each replica: the ranks of a replica have the same sums.
    ranks = {plan.stage_and_replica(rank)[1]: rank for rank in range(plan.workers)}.values()
    step_sums = [zip(*(gathered_sums[rank][step] for rank in ranks), strict=True) for step in range(len(sums))]
    return [sum(totals) / sum(counts) for totals, counts in step_sums]


def compare_freely(reference: ReferenceRun, trained: FreeRun) -> FreeRunDeviation:
    """Return how far a free run ends from the reference."""
    pairs = zip(reference.losses, trained.losses, strict=True)
    loss_error = max(divide_by_scale(abs(a - b), abs(a)) for a, b in pairs)
    errors = {name: relative_error(value, trained.state[name]) for name, value in reference.state.items()}
    name = max(errors, key=lambda tensor_name: errors[tensor_name], default="")
    worst = errors.get(name, 0.0)
    return FreeRunDeviation(loss_error, worst, name if worst else "")


def as_pass(run: TrainingRecord) -> MeasuredPass:
    """Return a whole run in the form of one pass, for its floors: gradients of the first step, losses as one tensor."""
    gradients = {name: gradient for name, gradient in run.gradients.items() if gradient is not None}
    return MeasuredPass(0.0, gradients, {**run.state, LOSSES: torch.tensor(run.losses, dtype=torch.float64)})


def compare_runs(training: ComparedTraining, reference: ReferenceRun, workers: Sequence[FreeRun]) -> Comparison:
    """Compare whole runs: the gradients of the first step, all losses, and the state after the last step.

    Args:
        training: the training that is compared.
        reference: the replay of the servers' record, with the floors of the whole run.
        workers: the results of each worker that trains.
    """
    prepared, tolerance = training.prepared, training.tolerance
    floors, first_run = reference.floors, workers[0]
    scales = [error_scale(abs(loss), floors.buffers.get(LOSSES, 0.0), tolerance) for loss in reference.losses]
    pairs = [zip(reference.losses, worker.losses, scales, strict=True) for worker in workers]
    errors = [
        max(step_errors)
        for step_errors in zip(*([divide_by_scale(abs(a - b), s) for a, b, s in p] for p in pairs), strict=True)
    ]
    loss_error = max(errors)
    # A tied weight appears once, and empty tensors have nothing to compare.
    deviations, undetermined = list[Deviation](), list[str]()
    for name, value in reference.state.items():
        if name in prepared.main_partition.graph.tied or not value.numel():
            continue
        error, expected, got = None, reference.gradients.get(name), first_run.gradients.get(name)
        if expected is not None or got is not None:
            target, actual = (torch.zeros_like(value) if gradient is None else gradient for gradient in (expected, got))
            floor = floors.gradients.get(name, 0.0)
            error = divide_by_scale(
                max_difference(target, actual), error_scale(max_magnitude(target), floor, tolerance)
            )
            undetermined += [] if is_determined(max_magnitude(target), floor) else [f"gradient of {name}"]
        floor = floors.buffers.get(name, 0.0)
        scale = error_scale(max_magnitude(value), floor, tolerance)
        deviations.append(Deviation(name, error, divide_by_scale(max_difference(value, first_run.state[name]), scale)))
        undetermined += [] if is_determined(max_magnitude(value), floor) else [name]
    return Comparison(
        reference=reference,
        losses=first_run.losses,
        loss_error=loss_error,
        deviations=tuple(deviations),
        held=[worker.held for worker in workers],
        worst=max((loss_error, *(deviation.worst for deviation in deviations))),
        culprit=_culprit_replayed(prepared, deviations, errors, tolerance),
        undetermined=tuple(undetermined),
    )


def _culprit_replayed(
    prepared: CompiledTraining, deviations: Sequence[Deviation], losses: Sequence[float], tolerance: float
) -> str | None:
    """Describe what differs first between whole runs: a gradient of the first step, a loss, or a weight at the end."""
    gradients = {deviation.name for deviation in deviations if not (deviation.gradient or 0.0) <= tolerance}
    state = {deviation.name for deviation in deviations if not deviation.value <= tolerance}
    step = next((number for number, error in enumerate(losses) if not error <= tolerance), None)
    if gradients:
        return describe_later_difference(prepared, StepDifference(gradients=gradients))
    if step is not None:
        return f"step {step + 1}: the loss of all replicas is the first number that differs"
    return describe_later_difference(prepared, StepDifference(len(losses) - 1, averaged=state)) if state else None
