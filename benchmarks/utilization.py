"""python -m benchmarks.utilization: measured utilization of the 2-stage GPT against theory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.harness import make_parser
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Span, Timeline
from polylane.runtime.job import Job
from polylane.runtime.workers.fork import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.action import ActionKind
from polylane.schedule.schedules import schedule_lanes

LEAD = 2  # steps that do not count


def passes(timeline: Timeline) -> Timeline:
    """Only the forward and backward passes: what theory draws."""
    kept = [span for span in timeline.spans if span.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    return Timeline(tuple(kept), timeline.ranks).from_zero()


def stage_seconds(timelines: list[Timeline], kind: ActionKind, stage: int) -> float:
    """Mean duration of a stage's passes of one kind, over all steps."""
    spans: list[Span] = [s for t in timelines for s in t.spans if s.action.kind is kind and s.action.stage == stage]
    return statistics.fmean(span.end - span.start for span in spans)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, play the same schedule with the measured stage times, and print both."""
    parser = make_parser("benchmarks.utilization", __doc__)
    parser.add_argument("--steps", type=int, default=12, help="the first two do not count (default 12)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps = LEAD + 1
    torch.set_num_threads(1)
    task = contenders.TASKS["tiny" if options.quick else "gpt"]()
    print("| schedule, m | measured | theory for its stage times | difference |\n|---|---|---|---|")
    for schedule in ("afab", "1f1b"):
        for m in (2,) if options.quick else (2, 4, 8):
            plan = f"pipeline=2,schedule={schedule},microbatches={m}"
            prepared = compile_training(
                TrainingProblem(task.model, build_objectives(task.loss, contenders.optimizer, None), task.batch), plan
            )

            def work(_: Any, prepared: Any = prepared) -> list[Timeline]:
                job = Job(prepared, World.join(), example=task.batch)
                return [passes(job.step(task.batch).timeline) for _ in range(options.steps)][LEAD:]

            timelines = fork_workers(work, 2)[0]
            forward = [stage_seconds(timelines, ActionKind.FORWARD, s) for s in range(2)]
            backward = [stage_seconds(timelines, ActionKind.BACKWARD, s) for s in range(2)]
            theory = simulate_schedule(schedule_lanes(schedule, 2, m), forward, backward).utilization()
            measured = statistics.median(t.utilization() for t in timelines)
            print(f"| {schedule}, {m} | {measured:.1%} | {theory:.1%} | {measured / theory - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
