"""Worker: what a process does as one of a training's workers, whoever has started it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from polylane.auto.plan_broadcast import compile_on_all_ranks
from polylane.commands.logs.step_log import Tell, TrainingOutcome
from polylane.commands.requests import TrainRequest
from polylane.commands.running.fewer_workers import gather_saved_plan, plan_for_started
from polylane.commands.running.recipe_training import RecipeTraining, check_last_batch, load_materials
from polylane.commands.running.resume import NothingLeft, share_checkpoints
from polylane.commands.running.resumed_microbatches import keep_microbatches
from polylane.commands.running.training_loop import RecipeLoop
from polylane.compile.compiled_training import CompiledTraining
from polylane.inspection.memory_prediction import with_predicted_memory
from polylane.inspection.predicted_run import predict_run
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.forked_child import end_forked_children
from polylane.runtime.workers.out_of_memory import OutOfMemory, out_of_memory
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.world import World


@dataclass(frozen=True)
class TrainingWorker:
    """One worker of a training that is compiled.

    Attributes:
        training: the recipe's model and data, with the options.
        compiled: the training, compiled for the plan.
        world: this worker among all workers.
        is_forked: whether the process that compiled forked all workers, which have the same weights from it.
    """

    training: RecipeTraining
    compiled: CompiledTraining
    world: World
    is_forked: bool = False

    def predict_run(self) -> dict[str, Any]:
        """Return what is predicted of the run, see :func:`.predicted_run.predict_run`."""
        return predict_run(self.training.problem, self.compiled, sys.argv)

    @end_forked_children()
    def train(self, tell: Tell) -> TrainingOutcome:
        """Train, and return the outcome; a collective of all workers.

        Args:
            tell: called with messages about the training, see :class:`.RecipeLoop`.
        """
        training, compiled, world = self.training, self.compiled, self.world
        try:
            # Before the job, in which this worker's model loses what others hold: an audit needs all of it.
            audits = training.start_auditor(compiled, world)
            job = training.job(compiled, world, same_weights=self.is_forked)
            try:
                return RecipeLoop(job, training, compiled, tell, world.stop, audits).run()
            except NothingLeft:  # raised on all workers, which close the job together
                raise
            except BaseException:
                # This process ends without waiting for the others, which may wait for it.
                job.abandon()
                raise
        except Exception as error:
            failure = error if isinstance(error, OutOfMemory) else out_of_memory(error, world.rank)
            if self.is_forked or failure is None:  # what a forked worker lacks is predicted by its launcher
                raise
            raise with_predicted_memory(failure, compiled, training.problem.samples) from None


def run_started_worker(
    request: TrainRequest,
    compiled: tuple[RecipeTraining, CompiledTraining] | None,
    pages: Mapping[int, ProgressMemory],
    context: WorkerContext,
) -> TrainingOutcome:
    """Train in a worker that the launcher of this host has started, and watches.

    Args:
        request: what is to be trained, and how, by which plan.
        compiled: what a forked worker has from the launcher; None for a new process, which builds all itself.
        pages: by rank, the page in which a worker writes where it is.
        context: rank and channels of this worker.
    """
    rank = context.rank
    # Dedicated servers have the ranks behind those that train.
    serves = compiled is not None and rank >= compiled[1].plan.workers
    world = replace(context.world, progress=ProgressWriter(pages[rank], rank, serves=serves))
    worker = TrainingWorker(*compiled, world, True) if compiled is not None else compile_together(request, world)
    if compiled is None and rank == 0:  # else the launcher has predicted it
        context.send_message({"kind": "predicted", "run": worker.predict_run()})
    return worker.train(context.send_message if rank == 0 else ignore)


@end_forked_children()
def compile_together(request: TrainRequest, world: World) -> TrainingWorker:
    """Compile on workers that share no memory: rank 0 measures and decides; a collective of all workers.

    Args:
        request: what is to be trained, and how; a plan that is to be searched is found for the workers that are here.
        world: this worker among all workers.
    """
    request = share_checkpoints(request, world)
    training = load_materials(request)
    training = replace(training, problem=replace(training.problem, device=world.accelerator))
    plan = plan_for_started(world, training.problem, request)
    compiled = compile_on_all_ranks(world, training.problem, plan)
    # A plan that names no number of microbatches takes the checkpoint's, where the numbers depend on it.
    if (saved := gather_saved_plan(world, request)) is not None:
        compile_again = partial(compile_on_all_ranks, world, training.problem)
        warn = warnings.warn if world.rank == 0 else ignore
        compiled = keep_microbatches(compiled, plan, saved, compile_again, warn)
    check_last_batch(training, compiled)
    training.check_rates(compiled)
    return TrainingWorker(training, compiled, world)


def ignore(message: Any) -> None:
    """Tell nobody: of all workers rank 0 speaks."""
