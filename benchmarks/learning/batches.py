"""python -m benchmarks.learning.batches [digits text] [--seeds S]: seconds to a loss by batch, and the noise scale.

Each batch trains with the learning rate that AdaScale gives it (for Adam its root), at the noise scale of the run with
the first batch; constant from then on. Seconds are steps times the median duration of a step with that batch, all
batches alternating in one process: so they do not depend on who else was on the machine when a run was made.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch

from benchmarks.contenders import untie_parameters
from benchmarks.harness import make_parser
from polylane.commands.learning.growing_batch import GrowingBatch, fit_step_seconds
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.efficiency.batch_rules import ScalingRule, learning_goodput, learning_rate_factor
from polylane.efficiency.noise_window import NoiseScale
from polylane.errors import PolylaneError
from polylane.recipe import Recipe, load
from polylane.runtime.job import Job
from polylane.runtime.telemetry.noise_log import NoiseLog
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

# Two parts, whose gradients are compared; and microbatches are those of BatchNorm.
PLAN = "microbatches=2"
# Samples over whose losses a mean is taken, which must be below the target.
WINDOW = 512
TURNS = 12


@dataclass(frozen=True)
class Task:
    """A training to a loss.

    Attributes:
        recipe: file of the model, the loss, the optimizer and the data.
        settings: of the recipe.
        batches: samples of a step, the first being that of the learning rate.
        target: mean loss of the last samples at which a training is over.
        most_samples: at which it is given up.
        rule: how the learning rate follows the batch.
    """

    recipe: str
    settings: Mapping[str, str]
    batches: tuple[int, ...]
    target: float
    most_samples: int
    rule: ScalingRule

    def load(self) -> Recipe:
        return load(self.recipe, dict(self.settings))


TASKS = {
    "digits": Task(
        "examples/digits.py", {"width": "16", "blocks": "1"}, (16, 32, 64, 128, 256, 512), 0.1, 40_000, "adascale"
    ),
    "text": Task(
        "examples/gpt.py",
        {"layers": "2", "hidden": "64", "seq_len": "32", "files": "16", "lr": "0.003", "dropout": "0"},
        (8, 16, 32, 64, 128, 256),
        2.3,
        120_000,
        "adascale-sqrt",
    ),
}


@dataclass(frozen=True)
class Run:
    """A training to the target.

    Attributes:
        steps: number of steps by their batch.
        noise: the noise scale at its end, of the gradients that the optimizer steps along.
        reached: whether the target was reached.
    """

    steps: Mapping[int, int]
    noise: NoiseScale
    reached: bool

    @property
    def samples(self) -> int:
        return sum(batch * count for batch, count in self.steps.items())

    def seconds(self, times: Callable[[int], float]) -> float:
        return sum(count * times(batch) for batch, count in self.steps.items())


@cache
def prepare(name: str) -> tuple[Recipe, CompiledTraining, Any, Any]:
    """Return a task's recipe, its training, an example and its data."""
    task = TASKS[name]
    recipe = task.load()
    torch.manual_seed(0)
    data = recipe.data("train")
    example = torch.utils.data.default_collate([data[i] for i in range(task.batches[0])])
    # Without a scheduler: it counts steps, of which batches take different numbers.
    objectives = build_objectives(recipe.loss, recipe.optimizer, None)
    problem = TrainingProblem(untie_parameters(recipe.model()), objectives, example, batch_size=task.batches[0])
    return recipe, compile_training(problem, PLAN), example, data


def alone(name: str, seed: int, work: Callable[[Job, Any], Any]) -> Any:
    """Return what work returns for a task in a process of its own, from a seed."""
    recipe, prepared, example, data = prepare(name)

    def run(_: Any) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        with Job(prepared, World.join(), example=example, seed=seed) as job:
            job.load_state_dict(untie_parameters(recipe.model()).state_dict())
            return work(job, data)

    return fork_workers(run, 1)[0]


def endless(job: Job, data: Any, growing: GrowingBatch) -> Iterator[Any]:
    """Yield batches of epochs one after another, each as large as it is to be then."""
    epoch, start = 0, None
    while True:
        size = growing.batch
        for batch in job.batches(data, size, drop_last=True, first_epoch=epoch, start=start):
            yield batch
            if growing.batch != size:
                start = job.position
                break
        else:
            epoch, start = epoch + 1, None


def train(name: str, batch: int, noise: float | None, seed: int, grows: bool = False) -> Run:
    """Train to the target, with a fixed batch or one that grows.

    Args:
        name: of the task.
        batch: samples of a step, or of the first ones.
        noise: noise scale by which the learning rate follows a fixed batch; None: it is that of the first one.
        seed: of weights and order.
        grows: whether the batch follows the noise scale.
    """
    task = TASKS[name]

    def work(job: Job, data: Any) -> Run:
        worker: Any = job.worker
        worker.telemetry.noise.turn_on(every_step=True)
        if noise is not None:
            worker.scale_rates(learning_rate_factor(task.rule, noise, batch, task.batches[0]))
        log, growing = NoiseLog(len(data)), GrowingBatch(batch, task.batches[-1], task.rule)
        steps, losses, samples = dict[int, int](), deque[tuple[int, float]](), 0
        for rows in endless(job, data, growing):
            result = job.step(rows)
            losses.append((result.samples, result.loss))
            log.add(result)
            steps[result.samples] = steps.get(result.samples, 0) + 1
            samples += result.samples
            while sum(count for count, _ in losses) - losses[0][0] >= WINDOW:
                losses.popleft()
            counted = sum(count for count, _ in losses)
            mean = sum(count * loss for count, loss in losses) / counted
            deciding = log.deciding_scale
            if (counted >= WINDOW and mean <= task.target) or samples > task.most_samples or math.isnan(mean):
                return Run(steps, deciding, mean <= task.target)
            if grows and log.reading is not None:
                growing.add_step(log.reading.costs[1])
                if (change := growing.decide(deciding)) is not None:
                    worker.scale_rates(change.rate_change)
        raise AssertionError("the data never end")

    return alone(name, seed, work)


def time_steps(name: str, turns: int) -> dict[int, float]:
    """Return the median seconds of a step by its batch, batches alternating."""

    def work(job: Job, data: Any) -> dict[int, float]:
        rows = {b: next(iter(job.batches(data, b, drop_last=True))) for b in TASKS[name].batches}
        seconds: dict[int, list[float]] = {batch: [] for batch in rows}
        for turn in range(turns + 1):
            for size, batch in rows.items():
                begin = time.perf_counter()
                float(job.step(batch).loss)
                if turn:
                    seconds[size].append(time.perf_counter() - begin)
        return {size: statistics.median(values) for size, values in seconds.items()}

    return alone(name, 0, work)


def compare(name: str, seeds: int, turns: int) -> None:
    """Print what each batch takes to the target, which one the noise scale recommends, and what growing ones take."""
    task, times = TASKS[name], time_steps(name, turns)
    fixed, each_sample = fit_step_seconds(times)
    base = task.batches[0]
    runs = {base: [train(name, base, None, seed) for seed in range(seeds)]}
    noise = statistics.median(run.noise.scale or run.noise.low or math.nan for run in runs[base])
    runs |= {b: [train(name, b, noise, seed) for seed in range(seeds)] for b in task.batches[1:]}
    goodputs = {b: learning_goodput(b / times[b], noise, b, base) for b in task.batches}
    best = max(goodputs, key=goodputs.__getitem__)
    print(f"\n{name}: mean loss {task.target:g} over {WINDOW} samples, by {PLAN}; noise scale {noise:.0f} samples\n")
    print("| batch | ms a step | steps | samples | seconds | of the first | predicted |\n|---|---|---|---|---|---|---|")
    means = {b: describe(found, times.__getitem__) for b, found in runs.items()}
    for batch, (cells, seconds) in means.items():
        label = f"**{batch}**, recommended" if batch == best else str(batch)
        shares = f"{seconds / means[base][1]:.0%} | {goodputs[base] / goodputs[batch]:.0%}"
        print(f"| {label} | {times[batch] * 1e3:.1f} | {cells} | {shares} |")
    grown = [train(name, base, None, seed, grows=True) for seed in range(seeds)]
    cells, seconds = describe(grown, lambda batch: fixed + each_sample * batch)
    sizes = sorted({size for run in grown for size in run.steps})
    print(f"| auto:{base}, {sizes[0]} to {sizes[-1]} | | {cells} | {seconds / means[base][1]:.0%} | |")
    reached = {b: seconds for b, (_, seconds) in means.items() if all(run.reached for run in runs[b])}
    fastest = min(reached or {base: math.nan}, key=lambda b: reached.get(b, math.nan))
    ratio = means[best][1] / means[fastest][1]
    print(f"\nRecommended: {best}, {ratio:.2f} times the seconds of the fastest, {fastest}.", flush=True)


def describe(runs: Sequence[Run], times: Callable[[int], float]) -> tuple[str, float]:
    """Return steps, samples and seconds of some runs as cells of a table, and the mean of their seconds."""
    steps = statistics.fmean(sum(run.steps.values()) for run in runs)
    samples, seconds = (statistics.fmean(v) for v in zip(*((r.samples, r.seconds(times)) for r in runs), strict=True))
    missed = "" if all(run.reached for run in runs) else " (not reached)"
    return f"{steps:.0f} | {samples:.0f} | {seconds:.2f}{missed}", seconds


COST_PLANS = (
    "microbatches=2",
    "data=2",
    "data=2,microbatches=2",
    "pipeline=2,microbatches=4",
    "tensor=2,microbatches=2",
    "data=2,shard=parameters",
)


def measure_cost(name: str, plans: Sequence[str], turns: int) -> None:
    """Print what measuring costs a step, steps with and without it alternating in one training, by plan."""
    task = TASKS[name]
    recipe, _, example, data = prepare(name)
    size = task.batches[2]
    print(
        f"\n{name}, batches of {size}\n\n| plan | ms a step | measured | cost | auto measures each | so it costs |\n"
        "|---|---|---|---|---|---|"
    )
    for plan in plans:
        objectives = build_objectives(recipe.loss, recipe.optimizer, None)
        problem = TrainingProblem(untie_parameters(recipe.model()), objectives, example, batch_size=size)
        prepared = compile_training(problem, plan)

        def work(_: Any, prepared: CompiledTraining = prepared) -> tuple[float, float, int] | str:
            torch.set_num_threads(1)
            with Job(prepared, World.join(), example=example) as job:
                meter: Any = job.worker.telemetry.noise  # type: ignore[union-attr]
                try:
                    meter.turn_on(every_step=True)
                except PolylaneError as error:
                    return str(error)
                seconds: tuple[list[float], list[float]] = [], []
                for turn, batch in enumerate(
                    islice(job.batches(data, size, epochs=1000, drop_last=True), 2 * turns + 4)
                ):
                    meter.is_on = bool(turn % 2)
                    begin = time.perf_counter()
                    float(job.step(batch).loss)
                    if turn >= 4:
                        seconds[turn % 2].append(time.perf_counter() - begin)
                meter.turn_on()
                for batch in islice(job.batches(data, size, epochs=1000, drop_last=True), turns):
                    job.step(batch)
                return statistics.median(seconds[0]), statistics.median(seconds[1]), meter.period

        found = fork_workers(work, prepared.plan.processes)[0]
        if isinstance(found, str):
            print(f"| `{plan}` | not measured: {found.partition(': ')[2]} | | | | |")
        else:
            plain, measured, period = found
            cost = measured / plain - 1
            times = f"{plain * 1e3:.1f} | {measured * 1e3:.1f} | {cost:.0%} | {period} steps | {cost / period:.1%}"
            print(f"| `{plan}` | {times} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the batches of each task."""
    parser = make_parser("benchmarks.learning.batches", __doc__)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []], help="digits, text; default: both")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of weights and order (default 3)")
    parser.add_argument("--cost", action="store_true", help="what measuring costs a step, and nothing else")
    options = parser.parse_args(arguments)
    if options.quick:
        for name, task in TASKS.items():
            TASKS[name] = replace(task, batches=task.batches[:3], most_samples=400)
    for name in options.tasks or TASKS:
        if options.cost:
            measure_cost(name, COST_PLANS[:2] if options.quick else COST_PLANS, 2 if options.quick else 40)
            continue
        compare(name, 1 if options.quick else options.seeds, 2 if options.quick else TURNS)


if __name__ == "__main__":
    main()
