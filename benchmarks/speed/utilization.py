"""python -m benchmarks.speed.utilization: utilization of a 2-stage GPT against theory, by schedule."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.harness import make_parser
from polylane.compile.compiled_training import CompiledTraining, compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Span, Timeline
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.action import PASSES, ActionKind
from polylane.schedule.schedules import ASYNCHRONOUS, NAMES, schedule_lanes, splits_backward
from polylane.schedule.stage_graph import StageGraph

WORKERS = 2
LEAD = 2  # steps that do not count
SYNCHRONOUS = ("afab", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "naive")
assert set(SYNCHRONOUS) == set(NAMES)


@dataclass(frozen=True)
class StageSeconds:
    """Mean durations of every stage's passes.

    Attributes:
        forward, backward: by stage; a backward pass in two halves counts as both.
        weight: by stage, of the half with the gradients of weights; 0 where backward passes are whole.
    """

    forward: list[float]
    backward: list[float]
    weight: list[float]


def passes(timeline: Timeline) -> Timeline:
    """Only the forward and backward passes: what theory draws."""
    return Timeline(tuple(span for span in timeline.spans if span.action.kind in PASSES), timeline.ranks).from_zero()


def stage_seconds(timelines: Sequence[Timeline], stages: int) -> StageSeconds:
    """Return the mean durations of every stage's passes, over all steps."""

    def mean(kind: ActionKind, stage: int) -> float:
        spans: list[Span] = [s for t in timelines for s in t.spans if s.action.kind is kind and s.action.stage == stage]
        return statistics.fmean(span.end - span.start for span in spans) if spans else 0.0

    forward, whole, first, second = (
        [mean(kind, stage) for stage in range(stages)]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    )
    return StageSeconds(forward, [sum(each) for each in zip(whole, first, second, strict=True)], second)


def step_utilization(prepared: CompiledTraining, seconds: StageSeconds) -> float:
    """Return the utilization of a synchronous step in theory, with measured durations and no communication."""
    graph, plan = StageGraph.of_partition(prepared.main_partition), prepared.plan
    lanes = schedule_lanes(plan.schedule, graph, plan.microbatches, workers=plan.stage_groups)
    weight = seconds.weight if splits_backward(plan.schedule) else None
    return simulate_schedule(lanes, seconds.forward, seconds.backward, graph=graph, weight=weight).utilization()


def steady_utilization(seconds: StageSeconds) -> float:
    """Return the utilization of a full asynchronous pipeline in theory: the slowest stage never waits."""
    own = [forward + backward for forward, backward in zip(seconds.forward, seconds.backward, strict=True)]
    return statistics.fmean(own) / max(own)


def full_window(timeline: Timeline) -> float:
    """Return the utilization between the last worker's first pass and the first worker's last one."""
    lanes = [[span for span in timeline.spans if span.rank == rank] for rank in range(timeline.ranks)]
    start, end = max(min(s.start for s in lane) for lane in lanes), min(max(s.end for s in lane) for lane in lanes)
    busy = sum(max(0.0, min(s.end, end) - max(s.start, start)) for lane in lanes for s in lane)
    return busy / (timeline.ranks * (end - start))


def measure(task: contenders.Task, schedule: str, microbatches: int, steps: int) -> tuple[float, float]:
    """Return the measured utilization, the median over steps, and that of theory for its stages' times."""
    # A batch of pipedream is one microbatch: its steps are short, and as many more.
    single = schedule == "pipedream"
    batch = tuple(leaf[: len(leaf) // microbatches] for leaf in task.batch) if single else task.batch
    count = LEAD + (steps - LEAD) * microbatches if single else steps
    plan = f"pipeline={WORKERS},schedule={schedule},microbatches={1 if single else microbatches}"
    problem = TrainingProblem(task.model, build_objectives(task.loss, contenders.optimizer, None), batch)
    prepared = compile_training(problem, plan)
    is_asynchronous = schedule in ASYNCHRONOUS

    def work(_: Any) -> list[Timeline]:
        with Job(prepared, World.join(), example=batch) as job:
            results = [job.step(batch) for _ in range(count)]
            if is_asynchronous:
                return [passes(job.timeline(min(count - LEAD, microbatches)))]
            return [passes(result.timeline) for result in results[LEAD:]]

    timelines = fork_workers(work, WORKERS)[0]
    seconds = stage_seconds(timelines, len(prepared.plan.stages))
    if is_asynchronous:
        return full_window(timelines[0]), steady_utilization(seconds)
    return statistics.median(timeline.utilization() for timeline in timelines), step_utilization(prepared, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, play the same schedule with the measured stage times, and print both."""
    parser = make_parser("benchmarks.speed.utilization", __doc__)
    parser.add_argument("--steps", type=int, default=12, help="the first two do not count (default 12)")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="*", metavar="NAME", default=[*SYNCHRONOUS, *ASYNCHRONOUS])
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.microbatches, options.schedules = LEAD + 1, [2], ["1f1b", "zb-h1", "pipedream"]
    torch.set_num_threads(1)
    # Asynchronous schedules refuse a weight on two stages.
    task = contenders.untie(contenders.TASKS["tiny" if options.quick else "gpt"]())
    print("| schedule, m | measured | theory for its stage times | difference |\n|---|---|---|---|")
    for schedule in options.schedules:
        for m in options.microbatches:
            measured, theory = measure(task, schedule, m, options.steps)
            print(f"| {schedule}, {m} | {measured:.1%} | {theory:.1%} | {measured / theory - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
