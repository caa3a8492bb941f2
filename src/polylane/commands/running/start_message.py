"""Start message: what is told of a training before its first step, with notes on what a user may not expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polylane.commands.learning.finished_steps import RunOptions
from polylane.commands.requests import TrainRequest
from polylane.commands.running.recipe_training import RecipeTraining
from polylane.commands.running.resumed_microbatches import note_other_microbatches
from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import format_plural
from polylane.plan import plan_file as plans
from polylane.plan.plan import Plan
from polylane.runtime.data.stream_state import keeps_state
from polylane.runtime.job import Job
from polylane.runtime.telemetry.preconditioner import divides_gradients


def begin_message(
    job: Job,
    training: RecipeTraining,
    prepared: CompiledTraining,
    saved: Plan | None,
    loss: float,
    changed: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the message.

    Args:
        job: this worker's part in the training, which has loaded its checkpoint.
        training: the recipe's model and data, with the options.
        prepared: the training, compiled for the plan.
        saved: the plan of the checkpoint that the run goes on from; None: it begins.
        loss: of the checkpoint's step; NaN where it has none.
        changed: notes on choices that are others than in the checkpoint's run.
    """
    in_epoch, epochs, total = len(training.batch_sizes) or None, training.epochs, training.request.steps
    if training.request.rates.largest_batch is not None:  # how many steps an epoch has is not known yet
        in_epoch = None
    if total is None and in_epoch is not None and epochs is not None:
        total = in_epoch * epochs
    return {
        "kind": "begin",
        "plan": plans.dump(prepared.plan),
        "spec": prepared.plan.spec,
        "options": _describe_options(job, training),
        "workers": prepared.plan.processes,
        "device": str(job.world.device.type),
        "steps": total,
        "epochs": epochs or (-(-total // in_epoch) if total and in_epoch else None),
        "resumed_at": job.position.step if training.request.resume_from is not None else None,
        "resumed_loss": loss,
        "resumed_own": _is_own_checkpoint(training.request),
        "notes": [
            *_note_resumed(job, training),
            *changed,
            *(note_other_microbatches(prepared, saved) if saved is not None else ()),
            *prepared.main_partition.graph.notes,
            *_note_inexact_sync(prepared.plan),
            *_note_short_epoch(training),
        ],
    }


def _describe_options(job: Job, training: RecipeTraining) -> dict[str, Any]:
    """Return what run.json says of the run, from which it may be predicted again."""
    request, divides = training.request, divides_gradients(job.optimizer)
    return RunOptions(
        request.recipe, request.settings, request.batch, request.seed, job.plan.processes, training.population, divides
    ).to_dict()


def _is_own_checkpoint(request: TrainRequest) -> bool:
    """Return whether the run goes on from a checkpoint of its own folder."""
    if request.resume_from is None or request.checkpoints is None:
        return False
    return request.resume_from.parent.resolve() == request.checkpoints.resolve()


def _note_resumed(job: Job, training: RecipeTraining) -> list[str]:
    """Return a note where the run goes on from a checkpoint."""
    if training.request.resume_from is None:
        return []
    at = job.position
    skipped = ""
    if at.samples and not training.batch_sizes and not keeps_state(training.train):
        skipped = f"; {format_plural(at.samples, 'sample')} of the stream are read and passed over"
    return [f"resumes from {training.request.resume_from}: step {at.step}, epoch {at.epoch + 1}{skipped}"]


def _note_inexact_sync(plan: Plan) -> list[str]:
    """Return a note where the numbers are not those of one device."""
    if plan.sync.is_exact or plan.data == 1:
        return []
    return [f"{','.join(plan.sync.to_words())}: the numbers are those of this rule, not those of one device"]


def _note_short_epoch(training: RecipeTraining) -> list[str]:
    """Return a note where the dataset has fewer samples than a batch was to have."""
    samples, batch = sum(training.batch_sizes), training.request.batch
    if not 0 < samples < batch:
        return []
    return [
        f"--batch {batch}: data('train') has {format_plural(samples, 'sample')}, so that an epoch is one "
        f"batch of {samples}"
    ]
