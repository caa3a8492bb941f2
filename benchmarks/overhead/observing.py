"""python -m benchmarks.overhead.observing [--rounds N] [--quick]: what the columns of observed steps cost a training.

In one job blocks of steps take turns: observed as they are by default, with the columns that rank 0 writes, and none of
them observed. Gradient noise has a budget of its own, and is off.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import make_parser
from benchmarks.overhead.audit import open_training
from polylane.commands.logs.step_columns import StepColumns
from polylane.runtime.telemetry.observed_steps import ObservedSteps
from polylane.runtime.telemetry.telemetry import Telemetry
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.threads import limit_to_one_thread

CASES = (("digits", "data=2"), ("digits", "pipeline=2,microbatches=4"), ("gpt", "data=2"), ("gpt", "pipeline=2"))
BLOCK = 60  # steps of a block
WARM = 60  # steps before the first block, after which the period of observed steps has settled


class NeverObserved(ObservedSteps):
    """Observes no step."""

    def begin_step(self, step: int) -> bool:
        return False


def measure(example: str, plan: str, blocks: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of a step in blocks with and without observed steps, and the steps between two of these."""
    training, prepared = open_training(example, plan)
    training = replace(training, request=replace(training.request, rates=replace(training.request.rates, noise="off")))

    def run(context: WorkerContext) -> tuple[list[float], list[float], int]:
        job = training.job(prepared, context.world)
        telemetry: Telemetry = job.worker.telemetry  # type: ignore[union-attr]
        graph, usual = prepared.main_partition.graph, telemetry._steps
        columns = StepColumns(prepared.plan, lambda: graph, 1e10, telemetry.timing)
        batches = job.batches(training.train, training.request.batch, epochs=10**6)
        times: dict[bool, list[float]] = {True: [], False: []}

        def train(steps: int) -> None:
            earlier = None
            for batch in itertools.islice(batches, steps):
                result = job.step(batch)
                if context.rank == 0 and earlier is not None:
                    columns.add(earlier)
                earlier = result
            assert earlier is not None
            _ = earlier.loss

        train(WARM)
        for number in range(2 * blocks):
            is_observed = number % 2 == 0
            telemetry._steps = usual if is_observed else NeverObserved()
            begin = time.perf_counter()
            train(BLOCK)
            times[is_observed].append((time.perf_counter() - begin) / BLOCK)
        telemetry._steps = usual
        job.close()
        return times[True], times[False], usual.period

    return fork_workers(run, prepared.plan.processes)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.overhead.observing", __doc__)
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each kind")
    options = parser.parse_args(arguments)
    limit_to_one_thread()
    for example, plan in CASES[:1] if options.quick else CASES:
        observed, plain, period = measure(example, plan, 2 if options.quick else options.rounds)
        ratios = [a / b for a, b in zip(observed, plain, strict=True)]
        print(
            f"{example} by {plan}: steps of {statistics.median(plain) * 1e3:.1f} ms, one in {period} observed: "
            f"{statistics.median(ratios):.4f} of the time without (quartiles "
            f"{statistics.quantiles(ratios, n=4)[0]:.4f} to {statistics.quantiles(ratios, n=4)[2]:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
