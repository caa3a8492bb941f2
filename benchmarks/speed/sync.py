"""python -m benchmarks.speed.sync [--epochs E] [--only WORDS]: every way in which replicas agree, on real digits.

What each gives (accuracy on the test set), how fast it is, what it sends, and what a straggler does to it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import make_parser
from benchmarks.speed.stragglers import Straggler, slow_down
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Timeline
from polylane.recipe import Recipe, load
from polylane.runtime.job import Job
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

KINDS = (
    "data=1",
    "data=2",
    "data=2,wire=bfloat16",
    "data=2,wire=float16",
    "data=2,compress=powersgd:4",
    "data=2,compress=top_k:0.05",
    "data=2,shard=optimizer",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "data=2,every=8",
    "data=2,every=8,warmup=23",
    "data=2,every=8,outer=0.7:0.9",
    "data=2,servers=1",
    "data=2,servers=2",
    "data=2,servers=2,staleness=2",
    "data=2,servers=2,staleness=any",
    "data=2,servers=1,dedicated=yes,staleness=any",
)
# Each replica takes five times as long in one of four steps, never both in the same.
STRAGGLERS = {0: Straggler(5, 4), 1: Straggler(5, 4)}
BATCH = 64
SLOWED = 40  # steps that are timed with a straggler
LEAD = 3  # steps that do not count


@dataclass(frozen=True)
class Outcome:
    """What one way came to.

    Attributes:
        plan: in one line.
        accuracy: share of the test images that are told right.
        rate: samples a second.
        slowed: the same with a straggler; None for one worker.
        sent: bytes that were sent in a step so that replicas agree, for each replica.
    """

    plan: str
    accuracy: float
    rate: float
    slowed: float | None
    sent: float


def prepared_for(recipe: Recipe, plan: str) -> tuple[CompiledTraining, Any]:
    """The recipe, split."""
    torch.manual_seed(0)
    samples = recipe.data("train")
    example = torch.utils.data.default_collate([samples[i] for i in range(BATCH)])
    objectives = build_objectives(recipe.loss, recipe.optimizer, recipe.scheduler)
    return compile_training(TrainingProblem(recipe.model(), objectives, example, batch_size=BATCH), plan), example


def trained(recipe: Recipe, plan: str, epochs: int) -> tuple[float, float, float]:
    """Accuracy on the test set, samples a second, and bytes sent per worker and step."""
    prepared, example = prepared_for(recipe, plan)
    plain = copy.deepcopy(prepared.model)

    def work(context: WorkerContext) -> tuple[dict[str, Any], float, float]:
        with Job(prepared, World.join(), example=example) as job:
            start, samples = time.perf_counter(), 0
            for batch in job.batches(recipe.data("train"), BATCH, epochs):
                samples += len(batch)
                job.step(batch)
            state = job.state_dict()
            seconds = time.perf_counter() - start
            sent = sum(each["agreement"] for each in job.traffic()) / prepared.plan.workers
            return state, samples / seconds, sent

    state, rate, sent = fork_workers(work, prepared.plan.processes)[0]
    plain.load_state_dict(state)
    return accuracy(plain, recipe), rate, sent


def accuracy(model: torch.nn.Module, recipe: Recipe) -> float:
    """Share of the test images that are told right."""
    test = recipe.data("test")
    images, labels = torch.utils.data.default_collate([test[i] for i in range(len(test))])
    with torch.no_grad():
        return float((model.eval()(images).argmax(-1) == labels).float().mean())


def slowed(recipe: Recipe, plan: str) -> float:
    """Samples a second where now this and now that replica is a straggler."""
    prepared, example = prepared_for(recipe, plan)

    def work(context: WorkerContext) -> tuple[int, float]:
        with Job(prepared, World.join(), example=example) as job:
            samples, start = 0, 0.0
            for step, batch in enumerate(job.batches(recipe.data("train"), BATCH, 1 + SLOWED * BATCH // 1400)):
                if step == LEAD:
                    samples, start = 0, time.perf_counter()
                if step == LEAD + SLOWED:
                    break
                samples += sum(share.samples * share.weight for share in job._role.shares(len(batch)))
                job.step(batch)
            return samples, time.perf_counter() - start

    with slow_down(STRAGGLERS):
        found = fork_workers(work, prepared.plan.processes)
    return sum(samples / seconds for samples, seconds in found[: prepared.plan.workers])


def drawn(recipe: Recipe, plan: str, folder: Path) -> Path:
    """Four steps with stragglers, as a swimlane."""
    prepared, example = prepared_for(recipe, plan)

    def work(context: WorkerContext) -> Timeline:
        with Job(prepared, World.join(), example=example) as job:
            for _, batch in zip(range(LEAD + 9), job.batches(recipe.data("train"), BATCH), strict=False):
                job.step(batch)
            return job.timeline(steps=4)

    with slow_down(STRAGGLERS):
        timeline = fork_workers(work, prepared.plan.processes)[0]
    timeline = replace(timeline, title=f"{plan}: four steps, with stragglers · measured")
    file = folder / f"stragglers-{plan.partition(',')[2].replace('=', '-').replace(',', '-') or 'sum'}.svg"
    file.write_text(swimlane.svg(timeline))
    return file


def measured(recipe: Recipe, plan: str, epochs: int) -> Outcome:
    """One way, trained and slowed."""
    right, rate, sent = trained(recipe, plan, epochs)
    alone = plan == "data=1"
    return Outcome(plan, right, rate, None if alone else slowed(recipe, plan), sent)


def table(outcomes: Sequence[Outcome]) -> str:
    """All ways, one a row."""
    lines = [
        "| how replicas agree | accuracy | samples/s | with stragglers | sent per replica and step |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in outcomes:
        late = "" if each.slowed is None else f"{each.slowed:.0f}"
        lines.append(f"| `{each.plan}` | {each.accuracy:.1%} | {each.rate:.0f} | {late} | {each.sent / 1e6:.2f} MB |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train by every way, and print the table."""
    parser = make_parser("benchmarks.speed.sync", __doc__)
    parser.add_argument("--epochs", type=int, default=8, help="how long each way trains (default 8)")
    parser.add_argument("--only", help="the ways that have this in their plan")
    parser.add_argument("--lanes", type=Path, metavar="FOLDER", help="draw stragglers instead, three ways")
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs = 1
    torch.set_num_threads(1)  # before anything runs: the workers are forked
    recipe = load("examples/digits.py", {})
    if options.lanes is not None:
        for plan in ("data=2", "data=2,every=4", "data=2,servers=2,staleness=2"):
            print(drawn(recipe, plan, options.lanes), flush=True)
        return
    chosen = [plan for plan in KINDS if options.only is None or options.only in plan]
    print(table([measured(recipe, plan, options.epochs) for plan in chosen]), flush=True)


if __name__ == "__main__":
    main()
