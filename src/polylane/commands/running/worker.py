"""Worker: the three ways in which a process becomes one of a training's workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polylane.auto.plan_broadcast import compile_on_all_ranks
from polylane.commands.requests import TrainRequest
from polylane.commands.running.fewer_workers import gather_saved_plan, plan_for_started
from polylane.commands.running.recipe_training import RecipeTraining, check_last_batch, load_materials
from polylane.commands.running.resume import NothingLeft
from polylane.commands.running.resumed_microbatches import keep_microbatches
from polylane.commands.running.step_log import Tell, TrainingOutcome
from polylane.commands.running.training_loop import train
from polylane.compile.compiled_training import CompiledTraining
from polylane.inspection.memory_prediction import with_predicted_memory
from polylane.runtime.job import Job
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.fork import WorkerContext
from polylane.runtime.workers.forked_child import end_forked_children
from polylane.runtime.workers.out_of_memory import OutOfMemory, out_of_memory
from polylane.runtime.workers.world import World
from polylane.verify.audit.audit_start import AuditStart


def run_forked_worker(
    training: RecipeTraining, prepared: CompiledTraining, pages: Mapping[int, ProgressMemory], context: WorkerContext
) -> TrainingOutcome:
    """Train in a worker that was forked from the process in which the training was compiled, and that watches it."""
    rank = context.rank
    progress = ProgressWriter(pages[rank], rank, serves=rank >= prepared.plan.workers)
    world = replace(context.world, progress=progress)
    audits = training.start_auditor(prepared, world)
    job = training.job(prepared, world)
    return train(job, training, prepared, context.send_message if rank == 0 else _tell_nobody, world.stop, audits)


def run_spawned_worker(
    request: TrainRequest, launcher: int, pages: Mapping[int, tuple[int, int]], context: WorkerContext
) -> TrainingOutcome:
    """Train in a worker that is a new process, which builds everything itself.

    Args:
        request: what is to be trained, and how.
        launcher: the process that started this one, and that watches it.
        pages: by rank, the descriptors of a worker's page and of the file for its stacks, in that process; or empty.
        context: rank and channels of this worker.
    """
    world = watched_by(launcher, pages, context.world)
    return run_torchrun_worker(request, world, context.send_message if context.rank == 0 else _tell_nobody)


def watched_by(launcher: int, pages: Mapping[int, tuple[int, int]], world: World) -> World:
    """Return the world of a new process that writes where it is into the page that its launcher made.

    Args:
        launcher, pages: as of :func:`run_spawned_worker`.
        world: this worker among all workers.
    """
    if world.rank in pages:
        with suppress(OSError):  # a /proc that shows nobody else's files: nobody watches
            memory = ProgressMemory.of_process(launcher, *pages[world.rank])
            return replace(world, progress=ProgressWriter(memory, world.rank))
    return world


@end_forked_children()
def run_torchrun_worker(request: TrainRequest, world: World, tell: Tell) -> TrainingOutcome:
    """Train in a worker that shares no memory with the others: rank 0 measures and decides, and its weights count."""
    # What was found on rank 0, which alone looks at the run's folder.
    paths = (str(request.resume_from or ""), str(request.checkpoints or ""))
    resume_from, checkpoints = (Path(path) if path else None for path in world.all_gather_object(paths)[0])
    request = replace(request, resume_from=resume_from, checkpoints=checkpoints)
    training = load_materials(request)
    training = replace(training, problem=replace(training.problem, device=world.accelerator))
    plan = plan_for_started(world, training.problem, request)
    prepared = compile_on_all_ranks(world, training.problem, plan)
    if (saved := gather_saved_plan(world, request)) is not None:
        compile_again = partial(compile_on_all_ranks, world, training.problem)
        warn = warnings.warn if world.rank == 0 else _say_nothing
        prepared = keep_microbatches(prepared, plan, saved, compile_again, warn)
    check_last_batch(training, prepared)
    try:
        audits = training.start_auditor(prepared, world)
        return _train_or_abandon(training.job(prepared, world, same_weights=False), training, prepared, tell, audits)
    except Exception as error:
        failure = error if isinstance(error, OutOfMemory) else out_of_memory(error, world.rank)
        if failure is None:
            raise
        raise with_predicted_memory(failure, prepared, training.problem.samples) from None


def _train_or_abandon(
    job: Job, training: RecipeTraining, prepared: CompiledTraining, tell: Tell, audits: AuditStart
) -> TrainingOutcome:
    """Train; after an error this worker's process ends without waiting for the others, which may wait for it."""
    try:
        return train(job, training, prepared, tell, job.world.stop, audits)
    except NothingLeft:  # raised on all workers, which close the job together
        raise
    except BaseException:
        job.abandon()
        raise


def _say_nothing(sentence: str) -> None:
    pass


def _tell_nobody(message: dict[str, Any]) -> None:
    pass
