"""What every worker does in a training: steps, tests, and telling how it goes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from polylane.commands import inputs
from polylane.commands.rates import Rates
from polylane.observe.timeline import Timeline
from polylane.plan import plan as plans
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.recipe import Recipe
from polylane.runtime import data
from polylane.runtime.agreement import prepare_together
from polylane.runtime.automatic import settled
from polylane.runtime.division import Batch
from polylane.runtime.job import Job
from polylane.runtime.launch import Context
from polylane.runtime.prepare import Objective, Prepared, prepare
from polylane.runtime.result import StepResult
from polylane.runtime.world import World

Tell = Callable[[dict[str, Any]], None]

# Of the last steps with a full batch the one of median duration is kept as representative.
LATE_STEPS = 15


@dataclass(frozen=True)
class Request:
    """What a command line asks for. Plain data: it travels to workers in new processes.

    Attributes:
        recipe, settings: as given.
        plan: one line, read, or a plan file; "auto" where workers are to find it when they are together.
        batch: samples in a batch, over all workers.
        epochs, steps: how long; one of them is None.
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
    stop_on_nan: bool
    drop_last: bool
    rates: Rates | None
    model_path: Path


@dataclass(frozen=True)
class Outcome:
    """How a training ended, the same on every worker (but for the clock).

    Attributes:
        plan: in one line.
        steps, samples, seconds: done, tests not counted.
        loss: of the last step's batch, before that step.
        train_loss: mean over the last epoch's samples.
        test_loss: at the end, None without test data.
        samples_per_second: over all steps but the first, in which connections are made.
        timeline: of a representative late step.
        stopped: the step and the epoch at which the loss was no number and training stopped.
    """

    plan: str
    steps: int
    samples: int
    seconds: float
    loss: float
    train_loss: float
    test_loss: float | None
    samples_per_second: float
    timeline: Timeline
    stopped: tuple[int, int] | None


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
    log = _Log(tell, job.slack)
    test_loss = None
    for epoch in itertools.count(1) if request.epochs is None else range(1, request.epochs + 1):
        log.begin_epoch()
        for batch in _epoch(job, request, materials, epoch):
            rate = _learning_rate(job)
            log.add(job.step(batch), epoch, rate)
            if (request.stop_on_nan and log.stopped) or log.launched == request.steps:
                break
        log.complete()
        if request.stop_on_nan and log.stopped:
            break
        if materials.test is not None:
            tell({"kind": "testing", "epoch": epoch})
            test_loss = _test_loss(job, request, materials)
        tell({"kind": "epoch", "epoch": epoch, "step": log.launched, **log.epoch_means(), "test_loss": test_loss})
        if log.launched == request.steps:
            break
    outcome = log.outcome(prepared.plan.spec, test_loss, stopped=request.stop_on_nan)
    if outcome.stopped is None:
        job.save(request.model_path)
    job.close()
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
        "workers": prepared.plan.workers,
        "device": str(job.world.device.type),
        "steps": total,
        "epochs": request.epochs or (-(-total // in_epoch) if total and in_epoch else None),
        "notes": list(prepared.main.graph.notes),
    }


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


class _Log:
    """What is known of the steps so far.

    The loss of a step is summed over the workers while the next ones run; it is read once the slowest worker has come
    to it as well, so that nobody waits for that.
    """

    def __init__(self, tell: Tell, slack: int) -> None:
        self._tell = tell
        self._slack = slack
        self._waiting: deque[Callable[[], None]] = deque()
        self._late: deque[tuple[float, StepResult]] = deque(maxlen=LATE_STEPS)
        self._full = 0  # samples of a full batch
        self._first: tuple[int, float] = (0, 0.0)  # samples and seconds of the first step
        self.launched = self.samples = 0
        self.seconds = 0.0
        self.loss = math.nan
        self.stopped: tuple[int, int] | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Start the clock of the epoch's first step, and the epoch's means."""
        self._mark = time.perf_counter()
        self._sum, self._count, self._epoch_seconds = 0.0, 0.0, 0.0

    def add(self, result: StepResult, epoch: int, learning_rate: float | None) -> None:
        """A step was done: tell of an earlier one."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        while len(self._waiting) >= self._slack:
            self._waiting.popleft()()
        self.launched += 1
        self.samples += result.samples
        self.seconds += seconds
        self._epoch_seconds += seconds
        if self.launched == 1:
            self._first = (result.samples, seconds)
        if result.samples > self._full:
            self._full = result.samples
            self._late.clear()
        if result.samples == self._full:
            self._late.append((seconds, result))
        self._waiting.append(partial(self._read, result, self.launched, epoch, seconds, learning_rate))

    def complete(self) -> None:
        """Read and tell the loss of all steps."""
        while self._waiting:
            self._waiting.popleft()()

    def _mean(self) -> float:
        return self._sum / self._count if self._count else math.nan

    def _read(self, result: StepResult, step: int, epoch: int, seconds: float, learning_rate: float | None) -> None:
        self.loss = result.loss
        total, count = result.sums
        self._sum += total
        self._count += count
        if self.stopped is None and not math.isfinite(self.loss):
            self.stopped = (step, epoch)
        self._tell(
            {
                "kind": "step",
                "step": step,
                "epoch": epoch,
                "loss": self.loss,
                "samples": result.samples,
                "seconds": seconds,
                "samples_per_second": result.samples / seconds,
                "learning_rate": learning_rate,
            }
        )

    def epoch_means(self) -> dict[str, float]:
        """Mean loss over the samples of the epoch so far, and the time its steps took."""
        return {"train_loss": self._mean(), "seconds": self._epoch_seconds}

    def outcome(self, plan: str, test_loss: float | None, stopped: bool) -> Outcome:
        """How it ended."""
        rest = (self.samples - self._first[0], self.seconds - self._first[1])
        samples, seconds = rest if self.launched > 1 else self._first
        return Outcome(
            plan=plan,
            steps=self.launched,
            samples=self.samples,
            seconds=self.seconds,
            loss=self.loss,
            train_loss=self._mean(),
            test_loss=test_loss,
            samples_per_second=samples / seconds,
            timeline=_representative(self._late),
            stopped=self.stopped if stopped else None,
        )


def _representative(late: Sequence[tuple[float, StepResult]]) -> Timeline:
    median = statistics.median_low(seconds for seconds, _ in late)
    result = next(result for seconds, result in late if seconds == median)
    timeline = result.timeline
    return replace(
        timeline, title=f"measured · step {result.step + 1}", notes={**timeline.notes, "step": str(result.step + 1)}
    )
