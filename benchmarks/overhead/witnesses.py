"""python -m benchmarks.overhead.witnesses [--steps N]: what a step pays for what is watched in it.

Counts of the whole batch before the first pass, the look at attributes that the user may have changed, the look for
values that are no numbers: the time spent in each, as a share of the steps, in one run. Replicas wait for each other in
the exchange of counts; what they would otherwise wait for later is told apart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness import make_parser
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.recipe import load
from polylane.runtime import compile_cache
from polylane.runtime.job import Job
from polylane.runtime.pipeline import anomalies as finite
from polylane.runtime.pipeline import executor as worker
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

LEAD = 3  # steps that do not count
MODELS: dict[str, dict[str, str]] = {
    "digits": {},
    "gpt": {"layers": "6", "hidden": "256", "heads": "8", "seq_len": "128"},
}
PLANS = ("data=1", "data=2", "pipeline=2,microbatches=4")
WATCHED = {
    "counts": (worker.Executor, "_add_batch_counts"),
    "counts: waiting for the other replicas": (worker.Executor, "_add_replicas"),
    "attributes": (compile_cache.SettingsVersions, "current"),
    "finite": (finite.AnomalyDetector, "check_forward"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = make_parser("benchmarks.overhead.witnesses", __doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed (default 40)")
    options = parser.parse_args(arguments)
    steps = 1 if options.quick else options.steps
    print(f"| model | plan | ms a step | {' | '.join(WATCHED)} |")
    print(f"|---|---|---|{'---|' * len(WATCHED)}")
    for name in ["digits"] if options.quick else MODELS:
        for plan in PLANS[1:2] if options.quick else PLANS:
            total, spent = measured(name, plan, steps)
            shares = [f"{spent.get(what, 0.0) / total:.3%}" for what in WATCHED]
            print(f"| {name} | {plan} | {total / steps * 1e3:.1f} | {' | '.join(shares)} |", flush=True)


def measured(name: str, plan: str, steps: int) -> tuple[float, dict[str, float]]:
    """Seconds of so many steps on rank 0, and those spent in what is watched."""
    torch.set_num_threads(1)
    recipe = load(f"examples/{name}.py", MODELS[name])
    samples = recipe.data("train")
    collate = recipe.collate or torch.utils.data.default_collate
    batch = collate([samples[i] for i in range(16 if name == "gpt" else 64)])
    torch.manual_seed(0)
    prepared = compile_training(
        TrainingProblem(recipe.model(), build_objectives(recipe.loss, recipe.optimizer, recipe.scheduler), batch), plan
    )

    def work(_: Any) -> tuple[float, dict[str, float]]:
        spent: dict[str, float] = defaultdict(float)
        for what, (owner, method) in WATCHED.items():
            setattr(owner, method, timed(getattr(owner, method), what, spent))
        with Job(prepared, World.join(), example=batch) as job:
            job.anomalies = finite.AnomalyDetector()
            for _ in range(LEAD):
                job.step(batch)
            spent.clear()
            start = time.perf_counter()
            for _ in range(steps):
                job.step(batch).loss  # noqa: B018
            return time.perf_counter() - start, dict(spent)

    return fork_workers(work, prepared.plan.processes)[0]


def timed(plain: Callable[..., Any], what: str, spent: dict[str, float]) -> Callable[..., Any]:
    """A method that adds what it takes to a sum."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            spent[what] += time.perf_counter() - start

    return call


if __name__ == "__main__":
    main()
