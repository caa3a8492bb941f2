"""What every worker does in a training: steps, tests, and telling how it goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from polylane.commands import inputs
from polylane.commands.rates import Rates
from polylane.commands.step_log import Log, Outcome, Tell, last_steps
from polylane.errors import NotFinite
from polylane.plan import plan as plans
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.recipe import Recipe
from polylane.runtime import data
from polylane.runtime.agreement import prepare_together
from polylane.runtime.automatic import settled
from polylane.runtime.division import Batch
from polylane.runtime.finite import Anomalies, Fault, first_of
from polylane.runtime.job import Job
from polylane.runtime.launch import Context
from polylane.runtime.prepare import Objective, Prepared, prepare
from polylane.runtime.sync.server_log import distribution
from polylane.runtime.world import World

OnNan = Literal["stop", "warn"]


@dataclass(frozen=True)
class Request:
    """What a command line asks for. Plain data: it travels to workers in new processes.

    Attributes:
        recipe, settings: as given.
        plan: one line, read, or a plan file; "auto" where workers are to find it when they are together.
        batch: samples in a batch, over all workers.
        epochs, steps: how long; one of them is None.
        on_nan: what is done about a loss that is not finite: stop, or say so and go on.
        drop_last: leave out an epoch's last batch where it is shorter than the others.
        rates: what is done with the recipe's learning rates; None: nothing.
        model_path: where the weights go.
    """

    recipe: str
    settings: tuple[str, ...]
    plan: Spec | Plan | Literal["auto"]
    batch: int
    epochs: int | None
    steps: int | None
    seed: int
    clip_norm: float | None
    on_nan: OnNan
    drop_last: bool
    rates: Rates | None
    model_path: Path


@dataclass(frozen=True)
class Materials:
    """What a recipe gives, made before any worker computes."""

    recipe: Recipe
    model: nn.Module
    train: Any
    test: Any
    example: Any

    @property
    def objectives(self) -> dict[str, Objective]:
        """The recipe's one objective, by name."""
        return {"loss": Objective("loss", self.recipe.loss, self.recipe.optimizer, self.recipe.scheduler)}


def gather(request: Request) -> Materials:
    """Model, data and an example batch.

    Raises:
        PolylaneError: the recipe is wrong, or one of its functions raised.
    """
    recipe = inputs.open_recipe(request.recipe, request.settings)
    recipe = recipe if request.rates is None else request.rates.of(recipe)
    model = inputs.build_model(recipe, request.seed)
    inputs.rehearse_optimizer(recipe, model)
    dataset = inputs.open_data(recipe, "train")
    example = inputs.example_batch(recipe, dataset, request.batch)
    if isinstance(dataset, Iterator):  # the example used some of it up
        dataset = inputs.open_data(recipe, "train")
    return Materials(recipe, model, dataset, inputs.open_data(recipe, "test"), example)


# Three ways to a job -------------------------------------------------------------------------------------------------


def prepare_once(request: Request, materials: Materials) -> Prepared:
    """In the parent, for workers that are forked from it."""
    prepared = prepare(
        materials.model,
        materials.objectives,
        materials.example,
        request.plan,
        batch_size=request.batch,
        evaluation=materials.test is not None,
        init=materials.recipe.init,
    )
    _see_last_batch(request, materials, prepared)
    return prepared


def forked(request: Request, materials: Materials, prepared: Prepared, context: Context) -> Outcome:
    """A worker that was forked from the process in which all was prepared."""
    job = Job(prepared, context.world, example=materials.example, clip_norm=request.clip_norm, seed=request.seed)
    return train(job, request, materials, prepared, context.message if context.rank == 0 else _silent)


def spawned(request: Request, context: Context) -> Outcome:
    """A worker in a new process: everything is made in it."""
    return apart(request, context.world, context.message if context.rank == 0 else _silent)


def apart(request: Request, world: World, tell: Tell) -> Outcome:
    """A worker that shares no memory with the others: rank 0 measures and decides, and its weights count."""
    materials = gather(request)
    model, objectives, example = materials.model, materials.objectives, materials.example
    plan = settled(world, model, objectives, example, request.plan, None)
    prepared = prepare_together(world, model, objectives, example, plan, request.batch, materials.recipe.init)
    _see_last_batch(request, materials, prepared)
    job = Job(
        prepared,
        world,
        example=materials.example,
        clip_norm=request.clip_norm,
        seed=request.seed,
        same_weights=False,
    )
    return train(job, request, materials, prepared, tell)


def _see_last_batch(request: Request, materials: Materials, prepared: Prepared) -> None:
    """Refuse now what could not be trained on at the end of an epoch.

    Raises:
        PolylaneError: the last batch is too short for the model.
    """
    sizes = _sizes(request, materials)
    if sizes and not _ends_before_last(request, sizes):
        what = f"the last batch of an epoch ({sum(sizes)} samples in batches of {request.batch})"
        prepared.fewest.check(sizes[-1], what, "leave it out with --drop-last, or take another --batch")


def _sizes(request: Request, materials: Materials) -> list[int]:
    """How many samples each batch of an epoch has; none where that is not known."""
    if not inputs.is_mapped(materials.train):
        return []
    return data.batch_sizes(len(materials.train), request.batch, request.drop_last)


def _ends_before_last(request: Request, sizes: Sequence[int]) -> bool:
    """Whether there are too few steps for the first epoch's last batch."""
    return request.steps is not None and request.steps < len(sizes)


def _silent(message: dict[str, Any]) -> None:
    pass


# Training ------------------------------------------------------------------------------------------------------------


def train(job: Job, request: Request, materials: Materials, prepared: Prepared, tell: Tell) -> Outcome:
    """Train as long as was asked for, test after each epoch, save the weights, and leave.

    What is told: one "begin", a "step" for each, a "testing" and an "epoch" after each epoch.
    """
    tell(_begin(job, request, materials, prepared))
    log, stops = Log(tell, lambda: job.slack), request.on_nan == "stop"
    job.anomalies = Anomalies() if stops else None  # it runs a pass again, which a run that goes on must not
    test_loss = None
    for epoch in itertools.count(1) if request.epochs is None else range(1, request.epochs + 1):
        log.begin_epoch()
        for batch in _epoch(job, request, materials, epoch):
            rate = _learning_rate(job)
            log.add(job.step(batch), epoch, rate, job.staleness if job.apart else None)
            if (stops and log.stopped and not job.apart) or log.launched == request.steps:
                break
        log.complete()
        if job.plan.sync.serves:  # a worker may know the losses of its own replica only, and one that serves none
            log.agree(job.gathered(log.own()))
        if stops and log.stopped:
            break
        if materials.test is not None:
            tell({"kind": "testing", "epoch": epoch})
            test_loss = _test_loss(job, request, materials)
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


def _saved(job: Job, request: Request, outcome: Outcome) -> Outcome:
    """Save the weights, where they are numbers."""
    try:
        job.save(request.model_path)
    except NotFinite as error:
        return replace(outcome, saved=False, cause=str(error))
    return outcome


def _begin(job: Job, request: Request, materials: Materials, prepared: Prepared) -> dict[str, Any]:
    in_epoch = len(_sizes(request, materials)) or None
    total = request.steps
    if total is None and in_epoch is not None and request.epochs is not None:
        total = in_epoch * request.epochs
    return {
        "kind": "begin",
        "plan": plans.dump(prepared.plan),
        "spec": prepared.plan.spec,
        "workers": prepared.plan.processes,
        "device": str(job.world.device.type),
        "steps": total,
        "epochs": request.epochs or (-(-total // in_epoch) if total and in_epoch else None),
        "notes": [*prepared.main.graph.notes, *_own_rule(prepared.plan), *_short_epoch(request, materials)],
    }


def _own_rule(plan: Plan) -> list[str]:
    """A note where the numbers are not those of one device."""
    if plan.sync.exact or plan.data == 1:
        return []
    return [f"{','.join(plan.sync.words())}: the numbers are those of this rule, not those of one device"]


def _short_epoch(request: Request, materials: Materials) -> list[str]:
    """A note where there are fewer samples than a batch was to have."""
    samples = sum(_sizes(request, materials))
    if not 0 < samples < request.batch:
        return []
    return [f"--batch {request.batch}: data('train') has {samples} samples, so that an epoch is one batch of {samples}"]


def _epoch(job: Job, request: Request, materials: Materials, epoch: int) -> Iterator[Batch]:
    dataset = materials.train
    if epoch > 1 and isinstance(dataset, Iterator):  # the first epoch used it up
        dataset = inputs.open_data(materials.recipe, "train")
    # What is not reached must not be refused.
    drop_last = request.drop_last or _ends_before_last(request, _sizes(request, materials))
    collate = materials.recipe.collate
    return job.batches(dataset, request.batch, first_epoch=epoch - 1, drop_last=drop_last, collate=collate)


def _learning_rate(job: Job) -> float | None:
    groups = job.optimizer.param_groups
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def _test_loss(job: Job, request: Request, materials: Materials) -> float:
    """Mean over all test samples, or over what a ``polylane.Mean`` counts."""
    test = materials.test
    if isinstance(test, Iterator):
        test = inputs.open_data(materials.recipe, "test")
    total = count = 0.0
    for batch in job.batches(test, request.batch, shuffle=False, collate=materials.recipe.collate):
        sums = job.evaluate_sums(batch)
        total, count = total + sums[0], count + sums[1]
    return total / count if count else math.nan
