"""Schedules by name: the lanes of each, and which stages its workers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polylane.schedule.action import ActionKind
from polylane.schedule.interleaved import interleaved
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import (
    Lanes,
    all_forward_all_backward,
    checked_stage_graph,
    naive,
    one_forward_one_backward,
)

# Schedules in which every worker has one stage.
SCHEDULES: dict[str, Callable[[int | StageGraph, int], Lanes]] = {
    "naive": naive,
    "afab": all_forward_all_backward,
    "1f1b": one_forward_one_backward,
}

# Schedules in which a worker may have several stages, its chunks, with the chunks of a worker if none are asked for.
DEFAULT_CHUNKS = {"interleaved": 2}

# All names, in the order in which they are shown.
NAMES = (*SCHEDULES, *DEFAULT_CHUNKS)


def assign_stages(schedule: str, workers: int, chunks: int) -> tuple[int, ...]:
    """Return the worker of each of a chain's ``workers * chunks`` stages: dealt round-robin.

    Args:
        schedule: a name of :data:`NAMES`.
        workers: number of workers, or of groups of workers that share each stage.
        chunks: number of stages of each worker.

    Raises:
        ValueError: an unknown name, or chunks that the schedule does not have.
    """
    _check_name(schedule)
    if schedule in SCHEDULES and chunks > 1:
        several = ", ".join(DEFAULT_CHUNKS)
        raise ValueError(f"the schedule {schedule} has one stage on a worker, not {chunks} chunks: try {several}")
    return tuple(stage % workers for stage in range(workers * chunks))


def schedule_lanes(
    schedule: str, stages: int | StageGraph, microbatches: int, workers: Sequence[int] | None = None
) -> Lanes:
    """Return the lanes of the schedule of that name, one for each worker.

    Args:
        schedule: a name of :data:`NAMES`.
        stages: number of stages of a chain, or the graph of the stages.
        microbatches: number of microbatches of a step.
        workers: the worker that has each stage, from 0; default: every stage has a worker of its own.

    Raises:
        ValueError: an unknown name, fewer than one stage or microbatch, or stages that are not on the workers that the
            schedule gives them to (:func:`assign_stages`).
    """
    _check_name(schedule)
    graph = checked_stage_graph(stages, microbatches)
    workers = tuple(range(graph.stages)) if workers is None else tuple(workers)
    count = 1 + max(workers)
    chunks, left = divmod(graph.stages, count)
    if left or workers != assign_stages(schedule, count, chunks):
        raise ValueError(f"the schedule {schedule} needs other stages on its workers than {workers}")
    if schedule in SCHEDULES:
        return SCHEDULES[schedule](graph, microbatches)
    # What a chain's order waits for is all that any graph with ascending edges can wait for.
    if any(before >= stage for stage, others in enumerate(graph.predecessors) for before in others):
        raise ValueError(f"the schedule {schedule} needs stages numbered so that each reads only earlier ones")
    return interleaved(count, chunks, microbatches)


def live_bound(
    schedule: str, stages: int | StageGraph, microbatches: int, stage: int, workers: Sequence[int] | None = None
) -> int:
    """Return the most microbatches that a stage has between the start of their forward and the end of their backward.

    Raises:
        ValueError: an unknown schedule, fewer than one stage or microbatch, or a stage that does not exist.
    """
    _check_name(schedule)
    graph = checked_stage_graph(stages, microbatches)
    if not 0 <= stage < graph.stages:
        raise ValueError(f"stage must lie between 0 and {graph.stages - 1}, not {stage}")
    live = most = 0
    for action in (a for lane in schedule_lanes(schedule, graph, microbatches, workers) for a in lane):
        live += (action.stage == stage) * (1 if action.kind is ActionKind.FORWARD else -1)
        most = max(most, live)
    return most


def _check_name(schedule: str) -> None:
    if schedule not in NAMES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(NAMES)}")
