"""python -m benchmarks.overhead.audit [--rounds N] [--quick]: what audits cost the training that they are made of.

The same training, with audits as they are by default and without any, takes turns: all steps of a run, from the first
to the end of the job, in workers of their own. The start, in which both capture the model, is left out.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import make_parser
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import TrainRequest
from polylane.commands.running.recipe_training import RecipeTraining, load_materials, prepare_once
from polylane.compile.compiled_training import CompiledTraining
from polylane.plan.spec import parse
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.threads import limit_to_one_thread
from polylane.verify.audit import AuditMode
from polylane.verify.audit.training_audit import attach_audit

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES = {"digits": 64, "gpt": 16}
PLANS = ("data=2", "pipeline=2,microbatches=4")
STEPS = 1000


def open_training(example: str, plan: str) -> tuple[RecipeTraining, CompiledTraining]:
    """Open an example's recipe, and compile it for a plan."""
    batch = BATCHES[example]
    request = TrainRequest(
        recipe=str(EXAMPLES / f"{example}.py"), batch=batch, plan=plan, rates=LearningRateOptions(batch)
    )
    training = load_materials(request)
    return training, prepare_once(training, parse(plan))


def train(
    training: RecipeTraining, prepared: CompiledTraining, mode: AuditMode, steps: int
) -> tuple[float, int, float]:
    """Return the seconds of all steps, the number of audited ones, and the seconds that audits account for."""
    training = replace(training, request=replace(training.request, audit=mode))

    def run(context: WorkerContext) -> tuple[float, int, float]:
        audits = training.start_auditor(prepared, context.world)
        job = training.job(prepared, context.world)
        audit = attach_audit(audits, job)
        batches = job.batches(training.train, training.request.batch, epochs=steps)
        begin = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            job.step(batch)
        job.close()
        seconds = time.perf_counter() - begin
        return (
            (seconds, 0, 0.0) if audit is None else (seconds, len(audit.report().steps), audit.report().stall_seconds)
        )

    return fork_workers(run, prepared.plan.processes)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.overhead.audit", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    options = parser.parse_args(arguments)
    limit_to_one_thread()
    rounds, steps = (1, 30) if options.quick else (options.rounds, options.steps)
    for example, plan in itertools.product(BATCHES, PLANS):
        training, prepared = open_training(example, plan)
        ratios, counts, seconds, shares = list[float](), list[int](), list[float](), list[float]()
        for _ in range(rounds):
            plain, _, _ = train(training, prepared, "off", steps)
            audited, count, stalls = train(training, prepared, "auto", steps)
            ratios.append(audited / plain)
            counts.append(count)
            seconds.append(plain / steps)
            shares.append(stalls / audited)
        print(
            f"{example} by {plan}: {steps} steps of {statistics.median(seconds) * 1e3:.1f} ms, audited at "
            f"{statistics.median(counts):g} steps: {statistics.median(ratios):.4f} of the time without audits "
            f"({min(ratios):.4f} to {max(ratios):.4f}); audits account for {statistics.median(shares):.2%} of it",
            flush=True,
        )


if __name__ == "__main__":
    main()
