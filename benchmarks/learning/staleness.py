"""python -m benchmarks.learning.staleness [digits text] [--epochs E] [--plan PLAN]: how stale weights learn.

The same model, data, order of samples and number of updates; weights that lack some of them. The figures do not depend
on how busy the machine is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import untie_parameters
from benchmarks.harness import make_parser
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.graph import Graph
from polylane.plan.spec import Spec, parse
from polylane.recipe import Recipe, load
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.asynchronous import weight_delays
from polylane.schedule.schedules import ASYNCHRONOUS

PLANS = (
    "data=1",
    "pipeline=4,schedule=1f1b,microbatches=4",
    "pipeline=2,schedule=pipedream",
    "pipeline=4,schedule=pipedream",
    "pipeline=4,schedule=pipedream,vertical_sync=yes",
    "pipeline=4,schedule=pipedream-2bw,microbatches=4",
)
QUICK = (PLANS[0], PLANS[2])


@dataclass(frozen=True)
class Course:
    """One training's task.

    Attributes:
        recipe: file of the model, the loss, the optimizer and the data.
        settings: of the recipe.
        batch: samples of a batch.
        steps: updates of an epoch; fewer than the data has end an epoch early.
        classes: whether what is told right is counted too.
    """

    recipe: str
    settings: dict[str, str]
    batch: int
    steps: int
    classes: bool

    def load(self) -> Recipe:
        return load(self.recipe, self.settings)


COURSES = {
    "digits": Course("examples/digits.py", {}, 64, 10_000, True),
    "text": Course(
        "examples/gpt.py",
        {"layers": "4", "hidden": "64", "seq_len": "32", "files": "16", "lr": "0.003", "steps": "240"},
        16,
        60,
        False,
    ),
}


@dataclass(frozen=True)
class Epoch:
    """What a model has learnt at the end of an epoch.

    Attributes:
        train: mean loss of the epoch's batches.
        test: loss of the test data.
        accuracy: share of the test samples that are told right; nan where that is not counted.
    """

    train: float
    test: float
    accuracy: float


def count_nodes(graph: Graph, *_: Any) -> tuple[float, ...]:
    """Take all nodes for equally long: measured times would cut elsewhere in every run, and other weights were late."""
    return (1.0,) * len(graph.nodes)


def train(course: Course, plan: str, epochs: int, steps: int, seed: int) -> list[Epoch]:
    """Train by a plan from a seed, and judge the model after every epoch."""
    recipe = course.load()
    torch.manual_seed(seed)
    data = recipe.data("train")
    example = torch.utils.data.default_collate([data[i] for i in range(course.batch)])
    objectives = build_objectives(recipe.loss, recipe.optimizer, recipe.scheduler)
    model = untie_parameters(recipe.model())
    problem = TrainingProblem(model, objectives, example, batch_size=course.batch)
    prepared = compile_training(problem, plan, seconds=count_nodes)

    def work(_: Any) -> list[tuple[float, dict[str, Any]]]:
        torch.set_num_threads(1)  # several would wait for each other on a machine with other things to do
        with Job(prepared, World.join(), example=example, seed=seed) as job:
            found = []
            for epoch in range(epochs):
                batches = job.batches(data, course.batch, drop_last=True, first_epoch=epoch)
                losses = [job.step(batch) for batch in islice(batches, steps)]
                found.append((statistics.fmean(each.loss for each in losses), job.state_dict()))
            return found

    judged = list[Epoch]()
    for loss, state in fork_workers(work, prepared.plan.processes)[0]:
        model.load_state_dict(state)
        judged.append(Epoch(loss, *judge(model, recipe, course)))
    return judged


def judge(model: nn.Module, recipe: Recipe, course: Course) -> tuple[float, float]:
    """Return the loss of at most 512 test samples, and the share of them that is told right."""
    test = recipe.data("test")
    inputs, labels = torch.utils.data.default_collate([test[i] for i in range(min(len(test), 512))])
    model.eval()
    with torch.no_grad():
        loss = float(recipe.loss(model, (inputs, labels)))
        right = float((model(inputs).argmax(-1) == labels).float().mean()) if course.classes else float("nan")
    model.train()
    return loss, right


def staleness(plan: str) -> str:
    """Updates that the weights of the stages lack, from the first stage on."""
    spec = parse(plan)
    assert isinstance(spec, Spec)
    if spec.schedule not in ASYNCHRONOUS:
        return "0"
    delays = weight_delays(spec.schedule, len(spec.meshes), spec.microbatches or 1, spec.vertical_sync)
    return ", ".join(map(str, delays))


def rows(course: Course, plans: Sequence[str], epochs: int, steps: int, seeds: int) -> Iterator[str]:
    """Yield the lines of a course's table, each as soon as its plan has been trained; means over seeds."""
    heads = " | ".join(f"epoch {epoch + 1}" for epoch in range(epochs))
    yield f"| plan | weights lack | {heads} |\n|---|---|{'---:|' * epochs}"
    show: Callable[[Epoch], float] = (lambda e: e.accuracy) if course.classes else (lambda e: e.test)
    for plan in plans:
        runs = [train(course, plan, epochs, steps, seed) for seed in range(seeds)]
        cells = []
        for same in zip(*runs, strict=True):
            trained, shown = statistics.fmean(e.train for e in same), statistics.fmean(map(show, same))
            cells.append(f"{trained:.3f}, {shown:.1%}" if course.classes else f"{trained:.3f}, {shown:.3f}")
        yield f"| `{plan}` | {staleness(plan)} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print the tables."""
    parser = make_parser("benchmarks.learning.staleness", __doc__)
    parser.add_argument("courses", nargs="*", metavar="COURSE", default=list(COURSES), help=f"of {', '.join(COURSES)}")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each training (default 6)")
    parser.add_argument("--plan", action="append", metavar="PLAN", help="train this plan only; may be repeated")
    parser.add_argument("--rate", help="learning rate of the text model (default 0.003)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each plan (default 3)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.courses:
        if name not in COURSES:
            parser.error(f"there is no course {name!r}: choose from {', '.join(COURSES)}")
        course = COURSES[name]
        if options.rate is not None and "lr" in course.settings:
            course = replace(course, settings=course.settings | {"lr": options.rate})
        second = "share of the test images told right" if course.classes else "loss of the test data"
        epochs, steps, seeds = (1, 3, 1) if options.quick else (options.epochs, course.steps, options.seeds)
        print(f"\n{name}: loss of the epoch, {second}; means of {seeds} seeds\n")
        for line in rows(course, options.plan or (QUICK if options.quick else PLANS), epochs, steps, seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
