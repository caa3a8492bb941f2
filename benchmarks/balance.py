"""python -m benchmarks.balance: stages of cost 1, 2, 1 on three workers, and with the middle one on two.

Every worker is held to a part of a core by the kernel (control groups), so that more workers than cores run at the same
time as they would on machines of their own. Where that is not allowed, nothing is measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.utilization import passes
from polylane.cost.simulate import play
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.runtime.job import Job
from polylane.runtime.launch import fork
from polylane.runtime.prepare import objectives_of, prepare
from polylane.runtime.world import World
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import schedule_lanes

GROUPS = Path("/sys/fs/cgroup/cpu")
WIDTH, MICROBATCHES, SAMPLES, STEPS = 512, 8, 64, 8
MESHES: tuple[tuple[dict[str, int], ...], ...] = (
    ({}, {}, {}),
    ({}, {"data": 2}, {}),
    ({}, {"tensor": 2}, {}),
)


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


def plan_of(meshes: tuple[dict[str, int], ...]) -> Plan:
    """One, two and one unit on stages with these meshes."""
    stages: list[dict[str, Any]] = []
    for nodes, mesh in zip((["0", "0"], ["1", "2"], ["3", "loss"]), meshes, strict=True):
        first = sum(len(stage["devices"]) for stage in stages)
        workers = max(mesh.values(), default=1)
        stages.append({"nodes": nodes, "devices": list(range(first, first + workers)), "mesh": mesh})
    return Plan.model_validate({"stages": stages, "microbatches": MICROBATCHES})


@contextmanager
def share_of_a_core(share: float) -> Iterator[None]:
    """Hold this process to so much of one core."""
    group = GROUPS / f"polylane-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("4000")
        (group / "cpu.cfs_quota_us").write_text(str(int(4000 * share)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def measured(plan: Plan, model: nn.Module, batch: list[Tensor], share: float) -> tuple[str, float, float]:
    """The plan in one line, utilization, and samples a second; medians over steps."""
    prepared = prepare(model, objectives_of(loss, lambda p: torch.optim.SGD(p, lr=1e-3), None), batch, plan)

    def work(_: Any) -> list[tuple[Timeline, float]]:
        with share_of_a_core(share):
            job = Job(prepared, World.join(), example=batch)
            found = []
            for _ in range(STEPS):
                start = time.perf_counter()
                timeline = passes(job.step(batch).timeline)
                found.append((timeline, time.perf_counter() - start))
            job.close()
        return found[2:]

    steps = fork(work, plan.workers)[0]
    utilization = statistics.median(timeline.utilization() for timeline, _ in steps)
    return prepared.plan.spec, utilization, len(batch[0]) / statistics.median(seconds for _, seconds in steps)


def predicted(plan: Plan) -> float:
    """Of an even division of the work, without any communication."""
    workers = [plan.degrees(stage).workers for stage in range(3)]
    each = [cost / count for cost, count in zip((1.0, 2.0, 1.0), workers, strict=True)]
    chain = StageGraph.chain(3)
    lanes = schedule_lanes(plan.schedule, chain, plan.microbatches)
    makespan = play(lanes, each, [2 * t for t in each], graph=chain).makespan()
    return 3 * 4.0 * plan.microbatches / (makespan * sum(workers))


def main() -> None:
    """Print a row for every plan."""
    torch.set_num_threads(1)
    if not os.access(GROUPS, os.W_OK):
        print(f"not measured: {GROUPS} cannot be written, so that workers cannot be held to a part of a core each")
        return
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit() for _ in range(4)))
    batch = [torch.randn(MICROBATCHES * SAMPLES, WIDTH), torch.randn(MICROBATCHES * SAMPLES, WIDTH)]
    share = 0.9 * (os.cpu_count() or 1) / 4
    print("| plan | predicted utilization | measured | samples/s |\n|---|---|---|---|")
    for meshes in MESHES:
        plan = plan_of(meshes)
        line, utilization, speed = measured(plan, model, batch, share)
        print(f"| {line} | {predicted(plan):.1%} | {utilization:.1%} | {speed:.0f} |", flush=True)


if __name__ == "__main__":
    main()
