"""python -m benchmarks.overhead.host_time [PLAN ...] [--rounds R]: the host's own time in a step, beside DDP and FSDP2.

A GPU waits for its host wherever the host launches slower than the GPU computes. So here is little else than the host:
a GPT of tiny tensors on two workers, over a backend whose operations end at once. What is counted is the CPU time of
the thread that trains, which takes turns between polylane, torch's own and a plain loop; then what its parts take.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polylane
from benchmarks.gpu import gpt
from benchmarks.harness import make_parser
from benchmarks.overhead.silent_backend import become_silent_worker
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.zero.all_gather_passes import GatheredPasses
from polylane.runtime.sync.zero.reduce_scatter import ReduceScatterer
from polylane.runtime.tensor_parallel import TransportAxis
from polylane.runtime.training_role import TrainingRole
from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

PLANS = ("data=2", "data=2,shard=parameters", "tensor=2", "pipeline=2,schedule=1f1b,microbatches=4")
FIGURES, SAMPLES = {"layers": 4, "hidden": 16, "heads": 2, "length": 8, "vocabulary": 17}, 8
# What is timed of a step: a method's time with all that it calls.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "forward pass of a stage": [(Executor, "_forward")],
    "backward pass of a stage": [(Executor, "_backward")],
    "message": [(C10dTransport, "send"), (C10dTransport, "receive")],
    "collective of operators, begun": [(TransportAxis, "begin_all_reduce"), (TransportAxis, "begin_exchange")],
    "bucket, launched": [(AllReducer, "_launch_bucket"), (ReduceScatterer, "_launch_shard")],
    "bucket, waited for": [(AllReducer, "wait_bucket"), (ReduceScatterer, "wait_bucket")],
    "unit, gathered": [(GatheredPasses, "_start_gather"), (GatheredPasses, "gather_unit")],
    "update of the weights": [(TrainingRole, "_apply_update")],
}

Step = Callable[[], Any]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return gpt.model(**FIGURES, tied=False)


def make_loop(wrap: Callable[[nn.Module], nn.Module], samples: int) -> Step:
    """Return a step of torch's own on so many samples."""
    model = wrap(build_model())
    optimizer = gpt.optimizer(list(model.named_parameters()))
    batch = gpt.tokens(samples, FIGURES["length"], FIGURES["vocabulary"])

    def step() -> None:
        optimizer.zero_grad()
        gpt.loss(model, batch).backward()
        optimizer.step()

    return step


def wrap_fully(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def count_microseconds(step: Step, steps: int) -> float:
    """Return the CPU time of this thread in one step."""
    start = time.thread_time()
    for _ in range(steps):
        step()
    return (time.thread_time() - start) / steps * 1e6


@contextmanager
def timing_parts() -> Iterator[dict[str, list[float]]]:
    """Context manager: collects the microseconds of each call of the parts."""
    times: dict[str, list[float]] = defaultdict(list)

    def wrap(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                times[label].append((time.thread_time() - start) * 1e6)

        return call

    with ExitStack() as stack:
        for label, methods in PARTS.items():
            for owner, name in methods:
                if name in owner.__dict__:
                    stack.enter_context(patch.object(owner, name, wrap(label, owner.__dict__[name])))
        yield times


def measure(plan: str, rounds: int, steps: int, profiled: int, context: WorkerContext) -> Any:
    """Measure a plan and torch's own in turns.

    Returns:
        Microseconds of a step by contender, and (calls a step, microseconds each) of each part of the plan's.
    """
    become_silent_worker()
    World.join().connect()
    half, batch = SAMPLES // 2, gpt.tokens(SAMPLES, FIGURES["length"], FIGURES["vocabulary"])
    job = polylane.parallelize(
        build_model(), gpt.loss, gpt.optimizer, example=batch, plan=plan, audit="off", alone=False
    )
    contenders: dict[str, Step] = {
        "plain loop": make_loop(lambda model: model, half),
        "torch DDP": make_loop(DistributedDataParallel, half),
        "torch FSDP2": make_loop(wrap_fully, half),
        plan: lambda: job.step(batch),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, step in contenders.items():
            taken = count_microseconds(step, steps)
            if number:  # the first turn warms up
                times[name].append(taken)
    with timing_parts() as calls:
        count_microseconds(contenders[plan], steps)
    parts = {label: (len(taken) / steps, statistics.median(taken)) for label, taken in calls.items()}
    if profiled:
        profile = cProfile.Profile()
        profile.runcall(count_microseconds, contenders[plan], 10 * steps)
        if context.rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(profiled)
    return {name: statistics.median(taken) for name, taken in times.items()}, parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = make_parser("benchmarks.overhead.host_time", __doc__)
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"plans for two workers (default {' '.join(PLANS)})")
    parser.add_argument("--rounds", type=int, default=20, help="turns that each contender has (default 20)")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="print the N dearest functions of each plan"
    )
    options = parser.parse_args(arguments)
    plans, rounds, steps = options.plans or PLANS, options.rounds, 10
    if options.quick:
        plans, rounds, steps = plans[:1], 1, 1
    results = {plan: fork_workers(partial(measure, plan, rounds, steps, options.profile), 2)[0] for plan in plans}
    print("| plan | us of a step | plain loop | torch DDP | torch FSDP2 | to DDP | to FSDP2 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for plan, (times, _) in results.items():
        plain, ddp, fsdp, own = times.values()
        print(f"| {plan} | {own:.0f} | {plain:.0f} | {ddp:.0f} | {fsdp:.0f} | {own / ddp:.2f} | {own / fsdp:.2f} |")
    print("\n| plan | part | times a step | us each |\n|---|---|---:|---:|")
    for plan, (_, parts) in results.items():
        for label, (count, microseconds) in parts.items():
            print(f"| {plan} | {label} | {count:g} | {microseconds:.0f} |")


if __name__ == "__main__":
    main()
