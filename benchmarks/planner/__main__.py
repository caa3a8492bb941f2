"""python -m benchmarks.planner: predicted against measured steps on this machine, and the plan that auto picks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from benchmarks.harness import Contender, make_parser, race
from polylane.auto.choose import EXAMPLE, measure
from polylane.cluster.cluster import Cluster
from polylane.cluster.cluster_file import load
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.plan.spec import parse
from polylane.planner import problem as setup
from polylane.planner.ranked_plan import weighted_seconds
from polylane.probe.machine import local_cluster
from polylane.recipe import load as load_recipe
from polylane.runtime.job import Job
from polylane.runtime.workers.threads import limit_to_one_thread
from polylane.runtime.workers.world import World

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANS = (
    "data=1",
    "data=2",
    "pipeline=2,schedule=1f1b,microbatches=4",
    "pipeline=2,schedule=afab,microbatches=2",
    "tensor=2",
    "data=2,pipeline=2,microbatches=4",
    "data=4",
)


@dataclass(frozen=True)
class Task:
    """A recipe with settings that make a step take long enough to be measured."""

    name: str
    recipe: str
    settings: dict[str, str]
    batch: int


TASKS = (
    Task("gpt", "gpt", {"layers": "4", "hidden": "256", "dropout": "0.0"}, 16),
    Task("wide gpt", "gpt", {"layers": "2", "hidden": "512", "dropout": "0.1"}, 8),
    Task("digits", "digits", {}, 256),
    Task("unet", "unet", {}, 64),
    Task("inception", "inception", {}, 64),
)


@dataclass
class Case:
    """A task under a plan.

    Attributes:
        task, plan: which.
        predicted: seconds of a step.
        measured: likewise; filled in later.
    """

    task: str
    plan: str
    predicted: float
    measured: float = 0.0

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure in turns, and print both."""
    parser = make_parser("benchmarks.planner", __doc__)
    parser.add_argument("--cluster", type=Path, help="a file that polylane probe wrote; default: presets")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each plan has (default 5)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default 3)")
    names = [task.name for task in TASKS]
    parser.add_argument("--tasks", nargs="*", default=names, choices=names, help="which are measured (default: all)")
    parser.add_argument("--plans", nargs="*", default=PLANS, help="which plans (default: all seven)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = options.steps = 1
    limit_to_one_thread()
    cluster = local_cluster(4) if options.cluster is None else load(options.cluster)
    plans = take_fitting(options.plans, cluster)
    if not plans:
        parser.error(f"--plans: none of them fits on the {cluster.count} devices of the cluster")
    cases, regrets = list[Case](), list[float]()
    for task in (task for task in TASKS if task.name in options.tasks):
        own, chosen = measured(task, cluster, options.rounds, options.steps, plans)
        cases += own
        best = min(case.measured for case in own)
        regrets.append(next(case.measured for case in own if case.plan == chosen) / best - 1)
        print(f"{task.name}: auto takes {chosen}, {regrets[-1]:.1%} slower than the best", flush=True)
    print(table(cases))
    errors = sorted(abs(case.error) for case in cases)
    print(f"{len(cases)} cases: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    print(f"regret: median {statistics.median(regrets):.1%}, worst {max(regrets):.1%}")


def take_fitting(plans: Sequence[str], cluster: Cluster) -> list[str]:
    """Return the plans that the cluster has workers for, and say which ones it has not."""
    fitting = [plan for plan in plans if parse(plan).processes <= cluster.count]
    if left := [plan for plan in plans if plan not in fitting]:
        print(f"left out, since the cluster has {cluster.count} devices: {', '.join(left)}")
    return fitting


def measured(
    task: Task, cluster: Cluster, rounds: int, steps: int, plans: Sequence[str] = PLANS
) -> tuple[list[Case], str]:
    """Every plan of a task, predicted and measured; and the one that `auto` takes of them by what is predicted."""
    recipe = load_recipe(EXAMPLES / f"{task.recipe}.py", task.settings)
    torch.manual_seed(0)
    model, dataset = recipe.model(), recipe.data("train")
    batch = (recipe.collate or default_collate)([dataset[i] for i in range(task.batch)])
    problem = TrainingProblem(model, build_objectives(recipe.loss, recipe.optimizer, None), batch)
    graph = problem.capture(EXAMPLE)
    basis = setup.build_cost_model(
        problem.captured(graph, profile=measure(graph, problem, min(4, cluster.count))), cluster, TrainingOptions()
    )
    cases, contenders = list[Case](), list[Contender]()
    for plan in plans:
        try:
            prepared = compile_training(problem, plan)
        except PolylaneError as error:
            print(f"{task.name}, {plan}: {error}")
            continue
        partition, fitted = setup.fit_plan(basis, parse(plan), task.batch)
        cases.append(Case(task.name, plan, predict(basis, partition, fitted, task.batch).seconds))
        contenders.append(Contender(plan, prepared.plan.workers, _setup(prepared, batch)))
    race(contenders, rounds, steps, lead=1)  # predictions are of a step among others
    for case, contender in zip(cases, contenders, strict=True):
        case.measured = contender.median
    counts = {contender.name: contender.workers for contender in contenders}
    return cases, min(cases, key=lambda case: weighted_seconds(case.predicted, counts[case.plan])).plan


def _setup(prepared: Any, batch: Any) -> Callable[[int], Callable[[], Any]]:
    def begin(rank: int) -> Callable[[], Any]:
        job = Job(prepared, World.join(), example=batch)
        return lambda: job.step(batch).loss

    return begin


def table(cases: Sequence[Case]) -> str:
    """All cases, the worst first."""
    lines = ["| task | plan | predicted, ms | measured, ms | error |", "|---|---|---:|---:|---:|"]
    for case in sorted(cases, key=lambda case: -abs(case.error)):
        times = f"{case.predicted * 1e3:.1f} | {case.measured * 1e3:.1f}"
        lines.append(f"| {case.task} | {case.plan} | {times} | {case.error:+.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
