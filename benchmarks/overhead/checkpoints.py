"""python -m benchmarks.overhead.checkpoints [--rounds N] [--quick]: what a checkpoint costs its training.

Blocks of steps with one checkpoint and without take turns, in one team of workers. A checkpoint costs its stall
(copying the state, agreeing) and what its writer takes of the cores meanwhile: the difference of the blocks has both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import make_parser
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.runtime.checkpoint.run_control import MOST_STALL, SaveInterval
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World

PLANS = ("data=1", "data=2", "pipeline=2,microbatches=4", "data=2,shard=parameters")
BLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class SaveCost:
    """What one plan's checkpoints cost.

    Attributes:
        megabytes: size of a checkpoint.
        stall: seconds that a save stopped the training, median.
        extra: seconds that a block with a save took longer than one without, median.
        written: seconds from a save to the complete checkpoint, median.
        step: seconds of a step without saves, median.
    """

    megabytes: float
    stall: float
    extra: float
    written: float
    step: float


def network(width: int) -> nn.Module:
    """Six layers of one width; AdamW keeps two states of each weight."""
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(6) for each in (nn.Linear(width, width), nn.Tanh())])


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-4, fused=True)


def measure(plan: str, width: int, rounds: int) -> SaveCost:
    """Measure a plan's checkpoints, on workers of one thread each."""
    batch = torch.randn(64, width)
    problem = TrainingProblem(network(width), build_objectives(squares, adamw, None), batch)
    prepared = compile_training(problem, plan)

    def work(_: Any) -> SaveCost:
        with tempfile.TemporaryDirectory() as folder, Job(prepared, World.join(), example=batch) as job:
            return _measure_job(job, batch, Path(job.gathered(folder)[0]), rounds)

    return fork_workers(work, prepared.plan.processes)[0]


def _measure_job(job: Job, batch: torch.Tensor, folder: Path, rounds: int) -> SaveCost:
    saver = job.open_saver(folder, keep=1)
    for _ in range(3):
        job.step(batch)
    begin = time.perf_counter()
    for _ in range(5):
        job.step(batch)
    steps = max(5, round(BLOCK_SECONDS / ((time.perf_counter() - begin) / 5)))
    steps = job.gathered(steps)[0]
    rows = list[tuple[float, float, float, float]]()
    for number in range(rounds + 1):
        plain = _time_block(job, batch, steps)
        stall, begin = saver.stall_seconds, time.perf_counter()
        job.begin_checkpoint(saver)
        written = 0.0
        for step in range(steps):
            job.step(batch)
            if saver.is_writing and step % max(1, steps // 20) == 0:
                saver.advance()
                written = time.perf_counter() - begin
        saver.finish()
        if number:  # the first save starts the writer's process
            rows.append((plain, time.perf_counter() - begin, saver.stall_seconds - stall, written))
    size = sum(file.stat().st_size for file in (saver.newest or folder).iterdir()) if job.world.rank == 0 else 0
    plain, saving, stalls, written_in = zip(*rows, strict=True)
    return SaveCost(
        size / 1e6,
        statistics.median(stalls),
        statistics.median(b - a for a, b in zip(plain, saving, strict=True)),
        statistics.median(written_in),
        statistics.median(plain) / steps,
    )


def _time_block(job: Job, batch: torch.Tensor, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        job.step(batch)
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.overhead.checkpoints", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="blocks with and without a save (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    width, rounds = (64, 1) if options.quick else (1300, options.rounds)
    print("plan                          MB  step ms  stall ms  block longer by ms  written in ms  auto: every  costs")
    for plan in PLANS:
        found = measure(plan, width, rounds)
        workers = 1 if plan == "data=1" else 2
        every = SaveInterval().due_seconds(1, found.stall, workers)
        print(
            f"{plan:<26} {found.megabytes:5.0f} {found.step * 1e3:9.1f} {found.stall * 1e3:10.1f} "
            f"{found.extra * 1e3:20.0f} {found.written * 1e3:15.0f} {every:11.0f} s {max(found.extra, 0) / every:7.2%}"
        )
    print(f"costs: of the time, at that interval; at most {MOST_STALL:.1%} is asked for")


if __name__ == "__main__":
    main()
