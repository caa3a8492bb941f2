"""Training on a worker: its steps, tests and epochs, and the messages about them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from polylane.auto.on_workers import resolve_plan
from polylane.auto.plan_broadcast import compile_on_all_ranks
from polylane.commands import user_inputs as inputs
from polylane.commands.requests import TrainRequest
from polylane.commands.step_log import StepLog, Tell, TrainingOutcome, last_steps
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.sample_shares import Batch
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import NotFinite
from polylane.inspection.memory_prediction import with_predicted_memory
from polylane.plan import plan_file as plans
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.recipe import Recipe
from polylane.runtime.data import loader as data
from polylane.runtime.job import Job
from polylane.runtime.pipeline.anomalies import AnomalyDetector, NonFiniteValue, earliest_fault
from polylane.runtime.sync.parameter_server.update_log import count_staleness
from polylane.runtime.workers.fork import WorkerContext
from polylane.runtime.workers.out_of_memory import OutOfMemory, out_of_memory
from polylane.runtime.workers.world import World


@dataclass(frozen=True)
class RecipeTraining:
    """A recipe's model and data, and how they are to be trained; made before any worker computes.

    Attributes:
        request: the options of the command line.
        recipe: the user's functions, with the learning rates that the command line asks for.
        problem: the model, its loss and optimizer, and the first batch.
        train: the training data, map-style or iterable.
        test: the test data, map-style or iterable; None where there is nothing to test on.
    """

    request: TrainRequest
    recipe: Recipe
    problem: TrainingProblem
    train: Any
    test: Any

    @cached_property
    def batch_sizes(self) -> list[int]:
        """The number of samples of each batch of an epoch; empty for an iterable dataset, whose length is not known."""
        if not inputs.is_mapped(self.train):
            return []
        return data.batch_sizes(len(self.train), self.request.batch, self.request.drop_last)

    @property
    def ends_before_last(self) -> bool:
        """Whether the training has fewer steps than the first epoch has batches."""
        steps = self.request.steps
        return steps is not None and steps < len(self.batch_sizes)

    @property
    def epochs(self) -> int | None:
        """The number of times through the data; None where steps are counted instead."""
        return 1 if self.request.epochs is None and self.request.steps is None else self.request.epochs

    def job(self, prepared: CompiledTraining, world: World, same_weights: bool = True) -> Job:
        """Return this worker's part in the training.

        Args:
            prepared: the problem, compiled for a plan.
            world: the process group of all workers.
            same_weights: whether all workers were forked from the process that built the model.
        """
        clip_norm, seed = self.request.clip_norm, self.request.seed
        example = self.problem.example
        return Job(prepared, world, example=example, clip_norm=clip_norm, seed=seed, same_weights=same_weights)


def load_materials(request: TrainRequest) -> RecipeTraining:
    """Load model, data and an example batch.

    Raises:
        PolylaneError: the recipe is wrong, or one of its functions raised.
    """
    recipe = request.rates.apply_to(inputs.open_recipe(request))
    problem, dataset = inputs.open_problem(recipe, request)
    if isinstance(dataset, Iterator):  # the example used some of it up
        dataset = inputs.open_data(recipe, "train")
    return RecipeTraining(request, recipe, problem, dataset, inputs.open_data(recipe, "test"))


# Three ways to a job -------------------------------------------------------------------------------------------------


def prepare_once(training: RecipeTraining, plan: Spec | Plan) -> CompiledTraining:
    """Compile the training in the parent process, for workers that are forked from it.

    Raises:
        PolylaneError: the plan does not fit the model, or the last batch is too short for it.
    """
    # The evaluation graph is compiled here as well, once for all workers.
    prepared = compile_training(training.problem, plan, evaluation=training.test is not None)
    _check_last_batch(training, prepared)
    return prepared


def run_forked_worker(training: RecipeTraining, prepared: CompiledTraining, context: WorkerContext) -> TrainingOutcome:
    """Train in a worker that was forked from the process in which the training was compiled."""
    job = training.job(prepared, context.world)
    return train(job, training, prepared, context.send_message if context.rank == 0 else _tell_nobody)


def run_spawned_worker(request: TrainRequest, context: WorkerContext) -> TrainingOutcome:
    """Train in a worker that is a new process, which builds everything itself."""
    return run_torchrun_worker(request, context.world, context.send_message if context.rank == 0 else _tell_nobody)


def run_torchrun_worker(request: TrainRequest, world: World, tell: Tell) -> TrainingOutcome:
    """Train in a worker that shares no memory with the others: rank 0 measures and decides, and its weights count."""
    training = load_materials(request)
    assert request.plan is not None
    # plan=auto plans for the example's samples, which are fewer than --batch where the dataset is smaller.
    plan = resolve_plan(world, replace(training.problem, batch_size=None), request.plan)
    prepared = compile_on_all_ranks(world, training.problem, plan)
    _check_last_batch(training, prepared)
    try:
        return train(training.job(prepared, world, same_weights=False), training, prepared, tell)
    except Exception as error:
        told = error if isinstance(error, OutOfMemory) else out_of_memory(error, world.rank)
        if told is None:
            raise
        raise with_predicted_memory(told, prepared, training.problem.samples) from None


def _check_last_batch(training: RecipeTraining, prepared: CompiledTraining) -> None:
    """Refuse a batch size with which the last batch of an epoch could not be trained on.

    Raises:
        PolylaneError: the last batch is too short for the model.
    """
    sizes = training.batch_sizes
    if sizes and not training.ends_before_last:
        what = f"the last batch of an epoch ({sum(sizes)} samples in batches of {training.request.batch})"
        prepared.min_samples.check(sizes[-1], what, "leave it out with --drop-last, or take another --batch")


def _tell_nobody(message: dict[str, Any]) -> None:
    pass


# Training ------------------------------------------------------------------------------------------------------------


def train(job: Job, training: RecipeTraining, prepared: CompiledTraining, tell: Tell) -> TrainingOutcome:
    """Train as long as was asked for, test after each epoch, save the weights, and close the job.

    Args:
        job: this worker's part in the training.
        training: the recipe's model and data, with the options.
        prepared: the training, compiled for the plan.
        tell: called with a "begin" message, a "step" for each step, and a "testing" and an "epoch" after each epoch.

    Returns:
        The outcome, the same on every worker but for times.
    """
    request, epochs = training.request, training.epochs
    tell(_begin(job, training, prepared))
    log, stops = StepLog(tell, lambda: job.slack), request.on_nan == "stop"
    # To find the first operator, the detector runs a pass again; a run that goes on must not do that.
    job.anomalies = AnomalyDetector() if stops else None
    test_loss = None
    for epoch in itertools.count(1) if epochs is None else range(1, epochs + 1):
        log.begin_epoch()
        for batch in _epoch(job, training, epoch):
            rate = _learning_rate(job)
            log.add(job.step(batch), epoch, rate, job.staleness if job.apart else None)
            # Asynchronous replicas stop at the end of the epoch: a replica that left within it would keep the others
            # waiting.
            if (stops and log.stopped and not job.apart) or log.launched == request.steps:
                break
        log.complete()
        # With servers a worker may have the losses of its own replica only, and a dedicated server has none.
        if job.plan.sync.has_servers:
            log.merge_epoch(job.gathered(log.epoch_losses()))
        if stops and log.stopped:
            break
        if training.test is not None:
            tell({"kind": "testing", "epoch": epoch})
            test_loss = _test_loss(job, training)
        tell({"kind": "epoch", "epoch": epoch, "step": log.launched, **log.epoch_means(), "test_loss": test_loss})
        if log.launched == request.steps:
            break
    outcome = log.outcome(prepared.plan.spec, test_loss, stopped=stops)
    servers = prepared.plan.processes - prepared.plan.workers
    # Collective, and so before any worker may raise or leave.
    outcome = replace(outcome, traffic=tuple(job.traffic()), servers=servers)
    if job.apart:
        staleness = count_staleness(update for server in job.updates() for update in server)
        outcome = replace(outcome, timeline=last_steps(job, log.launched), staleness=staleness)
    elif job.plan.is_asynchronous:  # a batch is under way in several steps, and stages are at different ones
        outcome = replace(outcome, timeline=last_steps(job, log.launched))
    if outcome.stopped is None:
        outcome = _save_weights(job, request, outcome)
    else:
        # Every worker looked at its own stage: the earliest of their findings is where it began.
        fault = earliest_fault(job.gathered(None if job.anomalies is None else job.anomalies.fault))
        outcome = replace(outcome, cause="" if fault is None else _describe_cause(fault, outcome))
    job.close()
    return outcome


def _describe_cause(fault: NonFiniteValue, outcome: TrainingOutcome) -> str:
    """Describe where the non-finite value began, with the step if it is not the one whose loss was seen."""
    step = fault.position[0] + 1
    when = "" if outcome.stopped is not None and outcome.stopped[0] == step else f" of step {step}"
    return f"{fault.description}{when}, on stage {fault.position[2]}"


def _save_weights(job: Job, request: TrainRequest, outcome: TrainingOutcome) -> TrainingOutcome:
    """Save the weights, unless some are not finite, and return the outcome."""
    assert request.model_path is not None
    try:
        job.save(request.model_path)
    except NotFinite as error:
        return replace(outcome, saved=False, cause=str(error))
    return outcome


def _begin(job: Job, training: RecipeTraining, prepared: CompiledTraining) -> dict[str, Any]:
    in_epoch, epochs, total = len(training.batch_sizes) or None, training.epochs, training.request.steps
    if total is None and in_epoch is not None and epochs is not None:
        total = in_epoch * epochs
    return {
        "kind": "begin",
        "plan": plans.dump(prepared.plan),
        "spec": prepared.plan.spec,
        "workers": prepared.plan.processes,
        "device": str(job.world.device.type),
        "steps": total,
        "epochs": epochs or (-(-total // in_epoch) if total and in_epoch else None),
        "notes": [
            *prepared.main_partition.graph.notes,
            *_note_inexact_sync(prepared.plan),
            *_note_short_epoch(training),
        ],
    }


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
    return [f"--batch {batch}: data('train') has {samples} samples, so that an epoch is one batch of {samples}"]


def _epoch(job: Job, training: RecipeTraining, epoch: int) -> Iterator[Batch]:
    dataset, request = training.train, training.request
    if epoch > 1 and isinstance(dataset, Iterator):  # an iterator is exhausted after the first epoch
        dataset = inputs.open_data(training.recipe, "train")
    # A short last batch that no step reaches must not be refused.
    drop_last = request.drop_last or training.ends_before_last
    collate = training.recipe.collate
    return job.batches(dataset, request.batch, first_epoch=epoch - 1, drop_last=drop_last, collate=collate)


def _learning_rate(job: Job) -> float | None:
    groups = job.optimizer.param_groups
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def _test_loss(job: Job, training: RecipeTraining) -> float:
    """Return the mean loss over all test samples, or over what a ``polylane.Mean`` counts."""
    test = training.test
    if isinstance(test, Iterator):
        test = inputs.open_data(training.recipe, "test")
    total = count = 0.0
    for batch in job.batches(test, training.request.batch, shuffle=False, collate=training.recipe.collate):
        sums = job.evaluate_sums(batch)
        total, count = total + sums[0], count + sums[1]
    return total / count if count else math.nan
