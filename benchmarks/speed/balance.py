"""python -m benchmarks.speed.balance: stages of cost 1, 2, 1 on three workers, and with the middle one on two.

Every worker is held to a part of a core by the kernel (control groups), so that more workers than cores run at the same
time as they would on machines of their own. Where that is not allowed, nothing is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import make_parser
from benchmarks.speed.cores import Groups, find, share_of_a_core
from benchmarks.speed.utilization import LEAD, passes, stage_seconds
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.graph.batch import take_samples
from polylane.inspection.plan_report import lanes_by_rank, price_stages, step_at_best
from polylane.observe.timeline import Timeline
from polylane.plan.fit_to_graph import assign_ranks
from polylane.plan.lanes import lanes_of
from polylane.plan.plan import Plan
from polylane.plan.spec import parse
from polylane.profiling.time_operators import measure_both
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.action import ActionKind
from polylane.schedule.stage_graph import StageGraph

WIDTH, MICROBATCHES, SAMPLES, STEPS = 512, 8, 64, 8
PLANS = ("pipeline=3", "[1 | data=2 | 1]", "[1 | tensor=2 | 1]")


class Unit(nn.Module):
    """One unit of work."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """A mean over samples."""
    return F.mse_loss(model(batch[0]), batch[1])


def plan_of(line: str) -> Plan:
    """One, two and one unit on stages with the meshes of a plan in one line."""
    meshes = parse(line).meshes
    stages = [
        {"nodes": nodes, "devices": devices, "mesh": mesh._asdict()}
        for nodes, devices, mesh in zip(
            (["0", "0"], ["1", "2"], ["3", "loss"]), assign_ranks(meshes), meshes, strict=True
        )
    ]
    return Plan.model_validate({"stages": stages, "microbatches": MICROBATCHES})


def prepared_for(line: str, model: nn.Module, batch: list[Tensor]) -> CompiledTraining:
    """The model by a plan in one line."""
    return compile_training(
        TrainingProblem(model, build_objectives(loss, lambda p: torch.optim.SGD(p, lr=1e-3), None), batch),
        plan_of(line),
    )


@dataclass(frozen=True)
class Measured:
    """Forward and backward passes of some steps, and seconds of each."""

    timelines: list[Timeline]
    seconds: list[float]


def measured(prepared: CompiledTraining, batch: list[Tensor], groups: Groups, share: float, steps: int) -> Measured:
    """Train with every worker on a part of a core."""

    def work(_: Any) -> Measured:
        found = Measured([], [])
        with share_of_a_core(groups, share):
            job = Job(prepared, World.join(), example=batch)
            for _ in range(steps):
                start = time.perf_counter()
                found.timelines.append(passes(job.step(batch).timeline))
                found.seconds.append(time.perf_counter() - start)
            job.close()
        return Measured(found.timelines[LEAD:], found.seconds[LEAD:])

    return fork_workers(work, prepared.plan.workers)[0]


def by_inspect(prepared: CompiledTraining, model: nn.Module, batch: list[Tensor]) -> float:
    """The utilization that `polylane inspect` prints: by the times of the operators, measured one by one."""
    graph = prepared.main_partition.graph
    seconds = measure_both(graph, model, loss, take_samples(batch, 0, graph.samples))
    return step_at_best(prepared, price_stages(prepared, seconds, len(batch[0]))).utilization()


def by_stage_times(prepared: CompiledTraining, timelines: list[Timeline]) -> float:
    """That of the schedule, played with the measured mean times of the stages' passes; waiting inside them is idle."""
    plan, order = prepared.plan, StageGraph.of_partition(prepared.main_partition)
    found = stage_seconds(timelines, plan.pipeline)
    played = simulate_schedule(lanes_of(plan, order), found.forward, found.backward, graph=order)
    waits = {
        (kind, stage): statistics.fmean(
            span.waited
            for timeline in timelines
            for span in timeline.spans
            if (span.action.kind, span.action.stage) == (kind, stage)
        )
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for stage in range(plan.pipeline)
    }
    spans = tuple(replace(span, waited=waits[span.action.kind, span.action.stage]) for span in played.spans)
    return lanes_by_rank(replace(played, spans=spans), plan).utilization()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for every plan."""
    options = make_parser("benchmarks.speed.balance", __doc__).parse_args(arguments)
    torch.set_num_threads(1)
    groups = find()
    if isinstance(groups, str):
        print(f"not measured, for workers cannot be held to a part of a core each: {groups}")
        return
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit() for _ in range(4)))
    batch = [torch.randn(MICROBATCHES * SAMPLES, WIDTH), torch.randn(MICROBATCHES * SAMPLES, WIDTH)]
    share = 0.9 * (os.cpu_count() or 1) / 4
    print("| plan | utilization by inspect | by its stage times | measured | samples/s |\n|---|---|---|---|---|")
    for line in PLANS[:1] if options.quick else PLANS:
        prepared = prepared_for(line, model, batch)
        told = by_inspect(prepared, model, batch)
        found = measured(prepared, batch, groups, share, LEAD + 1 if options.quick else STEPS)
        played = by_stage_times(prepared, found.timelines)
        utilization = statistics.median(timeline.utilization() for timeline in found.timelines)
        speed, cell = len(batch[0]) / statistics.median(found.seconds), line.replace("|", "\\|")
        print(f"| `{cell}` | {told:.1%} | {played:.1%} | {utilization:.1%} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
