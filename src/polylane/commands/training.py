"""What every worker does in a training: steps, tests, and telling how it goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from polylane.auto.on_workers import settled
from polylane.auto.plan_broadcast import prepare_together
from polylane.commands import inputs
from polylane.commands.requests import TrainRequest
from polylane.commands.step_log import Log, Outcome, Tell, last_steps
from polylane.errors import NotFinite
from polylane.plan import plan as plans
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.recipe import Recipe
from polylane.runtime import data
from polylane.runtime.division import Batch
from polylane.runtime.finite import Anomalies, Fault, first_of
from polylane.runtime.job import Job
from polylane.runtime.launch import Context
from polylane.runtime.prepare import Prepared
from polylane.runtime.sync.server_log import distribution
from polylane.runtime.training_problem import TrainingProblem
from polylane.runtime.world import World


@dataclass(frozen=True)
class RecipeTraining:
    """A recipe's model and data, made before any worker computes, and how they are to be trained.

    Attributes:
        request: what the command line asks for.
        recipe: the user's functions, with the learning rates that the command line asks for.
        problem: the model, its loss and optimizer, and the first batch.
        train: the training data, map-style or iterable.
        test: the test data, likewise; None where there is nothing to test on.
    """

    request: TrainRequest
    recipe: Recipe
    problem: TrainingProblem
    train: Any
    test: Any

    @cached_property
    def batch_sizes(self) -> list[int]:
        """How many samples each batch of an epoch has; none where that is not known."""
        if not inputs.is_mapped(self.train):
            return []
        return data.batch_sizes(len(self.train), self.request.batch, self.request.drop_last)

    @property
    def ends_before_last(self) -> bool:
        """Whether there are too few steps for the first epoch's last batch."""
        steps = self.request.steps
        return steps is not None and steps < len(self.batch_sizes)

    @property
    def epochs(self) -> int | None:
        """Times through the data; None where the steps are counted instead."""
        return 1 if self.request.epochs is None and self.request.steps is None else self.request.epochs

    def job(self, prepared: Prepared, world: World, same_weights: bool = True) -> Job:
        """This worker's part in the training.

        Args:
            prepared: the problem, compiled for a plan.
            world: the process group of all workers.
            same_weights: all workers were forked from the process that built the model.
        """
        request, example = self.request, self.problem.example
        how: dict[str, Any] = {"clip_norm": request.clip_norm, "seed": request.seed, "same_weights": same_weights}
        return Job(prepared, world, example=example, **how)


def gather(request: TrainRequest) -> RecipeTraining:
    """Model, data and an example batch.

    Raises:
        PolylaneError: the recipe is wrong, or one of its functions raised.
    """
    recipe = inputs.open_recipe(request)
    recipe = recipe if request.rates is None else request.rates.of(recipe)
    problem, dataset = inputs.open_problem(recipe, request)
    if isinstance(dataset, Iterator):  # the example used some of it up
        dataset = inputs.open_data(recipe, "train")
    return RecipeTraining(request, recipe, problem, dataset, inputs.open_data(recipe, "test"))


# Three ways to a job -------------------------------------------------------------------------------------------------


def prepare_once(training: RecipeTraining, plan: Spec | Plan) -> Prepared:
    """In the parent, for workers that are forked from it."""
    prepared = training.problem.prepare(plan, evaluation=training.test is not None)
    _see_last_batch(training, prepared)
    return prepared


def forked(training: RecipeTraining, prepared: Prepared, context: Context) -> Outcome:
    """A worker that was forked from the process in which all was prepared."""
    job = training.job(prepared, context.world)
    return train(job, training, prepared, context.message if context.rank == 0 else _silent)


def spawned(request: TrainRequest, context: Context) -> Outcome:
    """A worker in a new process: everything is made in it."""
    return apart(request, context.world, context.message if context.rank == 0 else _silent)


def apart(request: TrainRequest, world: World, tell: Tell) -> Outcome:
    """A worker that shares no memory with the others: rank 0 measures and decides, and its weights count."""
    training = gather(request)
    assert request.plan is not None
    # The best plan is that of steps of as many samples as there are.
    plan = settled(world, replace(training.problem, batch_size=None), request.plan)
    prepared = prepare_together(world, training.problem, plan)
    _see_last_batch(training, prepared)
    return train(training.job(prepared, world, same_weights=False), training, prepared, tell)


def _see_last_batch(training: RecipeTraining, prepared: Prepared) -> None:
    """Refuse now what could not be trained on at the end of an epoch.

    Raises:
        PolylaneError: the last batch is too short for the model.
    """
    sizes = training.batch_sizes
    if sizes and not training.ends_before_last:
        what = f"the last batch of an epoch ({sum(sizes)} samples in batches of {training.request.batch})"
        prepared.fewest.check(sizes[-1], what, "leave it out with --drop-last, or take another --batch")


def _silent(message: dict[str, Any]) -> None:
    pass


# Training ------------------------------------------------------------------------------------------------------------


def train(job: Job, training: RecipeTraining, prepared: Prepared, tell: Tell) -> Outcome:
    """Train as long as was asked for, test after each epoch, save the weights, and leave.

    What is told: one "begin", a "step" for each, a "testing" and an "epoch" after each epoch.
    """
    request, epochs = training.request, training.epochs
    tell(_begin(job, training, prepared))
    log, stops = Log(tell, lambda: job.slack), request.on_nan == "stop"
    job.anomalies = Anomalies() if stops else None  # it runs a pass again, which a run that goes on must not
    test_loss = None
    for epoch in itertools.count(1) if epochs is None else range(1, epochs + 1):
        log.begin_epoch()
        for batch in _epoch(job, training, epoch):
            rate = _learning_rate(job)
            log.add(job.step(batch), epoch, rate, job.staleness if job.apart else None)
            if (stops and log.stopped and not job.apart) or log.launched == request.steps:
                break
        log.complete()
        if job.plan.sync.serves:  # a worker may know the losses of its own replica only, and one that serves none
            log.agree(job.gathered(log.own()))
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
    outcome = replace(outcome, traffic=tuple(job.traffic()), servers=servers)
    if job.apart:
        staleness = distribution(update for server in job.updates() for update in server)
        outcome = replace(outcome, timeline=last_steps(job, log.launched), staleness=staleness)
    if outcome.stopped is None:
        outcome = _saved(job, request, outcome)
    else:
        fault = first_of(job.gathered(None if job.anomalies is None else job.anomalies.fault))
        outcome = replace(outcome, cause="" if fault is None else _caused(fault, outcome))
    job.close()
    return outcome


def _caused(fault: Fault, outcome: Outcome) -> str:
    """Where it began; the step is said where it is not the one whose loss was seen."""
    step = fault.at[0] + 1
    when = "" if outcome.stopped is not None and outcome.stopped[0] == step else f" of step {step}"
    return f"{fault.said}{when}, on stage {fault.at[2]}"


def _saved(job: Job, request: TrainRequest, outcome: Outcome) -> Outcome:
    """Save the weights, where they are numbers."""
    assert request.model_path is not None
    try:
        job.save(request.model_path)
    except NotFinite as error:
        return replace(outcome, saved=False, cause=str(error))
    return outcome


def _begin(job: Job, training: RecipeTraining, prepared: Prepared) -> dict[str, Any]:
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
        "notes": [*prepared.main.graph.notes, *_own_rule(prepared.plan), *_short_epoch(training)],
    }


def _own_rule(plan: Plan) -> list[str]:
    """A note where the numbers are not those of one device."""
    if plan.sync.exact or plan.data == 1:
        return []
    return [f"{','.join(plan.sync.words())}: the numbers are those of this rule, not those of one device"]


def _short_epoch(training: RecipeTraining) -> list[str]:
    """A note where there are fewer samples than a batch was to have."""
    samples, batch = sum(training.batch_sizes), training.request.batch
    if not 0 < samples < batch:
        return []
    return [f"--batch {batch}: data('train') has {samples} samples, so that an epoch is one batch of {samples}"]


def _epoch(job: Job, training: RecipeTraining, epoch: int) -> Iterator[Batch]:
    dataset, request = training.train, training.request
    if epoch > 1 and isinstance(dataset, Iterator):  # the first epoch used it up
        dataset = inputs.open_data(training.recipe, "train")
    # What is not reached must not be refused.
    drop_last = request.drop_last or training.ends_before_last
    collate = training.recipe.collate
    return job.batches(dataset, request.batch, first_epoch=epoch - 1, drop_last=drop_last, collate=collate)


def _learning_rate(job: Job) -> float | None:
    groups = job.optimizer.param_groups
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def _test_loss(job: Job, training: RecipeTraining) -> float:
    """Mean over all test samples, or over what a ``polylane.Mean`` counts."""
    test = training.test
    if isinstance(test, Iterator):
        test = inputs.open_data(training.recipe, "test")
    total = count = 0.0
    for batch in job.batches(test, training.request.batch, shuffle=False, collate=training.recipe.collate):
        sums = job.evaluate_sums(batch)
        total, count = total + sums[0], count + sums[1]
    return total / count if count else math.nan
