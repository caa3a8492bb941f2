"""Schedules by name: the lanes of each, and which stages its workers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polylane.schedule.asynchronous import steps_in_flight
from polylane.schedule.interleaved import interleaved
from polylane.schedule.live import peak_live
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import (
    Lanes,
    all_forward_all_backward,
    checked_stage_graph,
    naive,
    one_forward_one_backward,
)
from polylane.schedule.zero_bubble import v_stages, zero_bubble_h1, zero_bubble_h2, zero_bubble_v

# Schedules in which every worker has one stage, and a backward pass is one action.
SCHEDULES: dict[str, Callable[[int | StageGraph, int], Lanes]] = {
    "naive": naive,
    "afab": all_forward_all_backward,
    "1f1b": one_forward_one_backward,
}

# Schedules in which every worker has one stage, and a backward pass is in two halves.
_SPLIT: dict[str, Callable[[int | StageGraph, int], Lanes]] = {"zb-h1": zero_bubble_h1, "zb-h2": zero_bubble_h2}


@dataclass(frozen=True, slots=True)
class _Chunked:
    """A schedule in which a worker has several stages, its chunks.

    Attributes:
        build: (workers, chunks, microbatches) -> lanes of a chain of ``workers * chunks`` stages.
        assign: (workers, chunks) -> the worker of each stage.
        default: chunks of a worker, if none are asked for.
        fixed: whether a worker has exactly that many.
        split: whether a backward pass is in two halves.
    """

    build: Callable[[int, int, int], Lanes]
    assign: Callable[[int, int], tuple[int, ...]]
    default: int
    fixed: bool
    split: bool


_CHUNKED = {
    "interleaved": _Chunked(
        build=interleaved,
        assign=lambda workers, chunks: tuple(stage % workers for stage in range(workers * chunks)),
        default=2,
        fixed=False,
        split=False,
    ),
    "zb-v": _Chunked(
        build=lambda workers, chunks, microbatches: zero_bubble_v(workers, microbatches),
        assign=lambda workers, chunks: v_stages(workers),
        default=2,
        fixed=True,
        split=True,
    ),
}

# Schedules in which a worker may have several stages, its chunks, with the chunks of a worker if none are asked for.
DEFAULT_CHUNKS = {name: schedule.default for name, schedule in _CHUNKED.items()}

# All names, in the order in which they are shown.
NAMES = (*SCHEDULES, "interleaved", *_SPLIT, "zb-v")

# Schedules without a flush between steps, of `polylane.schedule.asynchronous`: a batch is under way in several steps.
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")

# The schedule that is found for a plan's times, see `polylane.schedule.search`: its order is in the plan.
FOUND = "auto"

# All names that a plan may have, and those under which workers may have several stages.
RUNNABLE = (*NAMES, *ASYNCHRONOUS, FOUND)
WITH_CHUNKS = (*DEFAULT_CHUNKS, FOUND)


def splits_backward(schedule: str) -> bool:
    """Return whether the schedule runs backward passes in two halves: input gradients, then weight gradients.

    Raises:
        ValueError: no schedule has that name.
    """
    _check_name(schedule)
    return schedule in _SPLIT or (schedule in _CHUNKED and _CHUNKED[schedule].split)


def assign_stages(schedule: str, workers: int, chunks: int) -> tuple[int, ...]:
    """Return the worker of each of a chain's ``workers * chunks`` stages.

    Most schedules deal them round-robin; ``zb-v`` lays them out as a V, stage s on worker s or 2k - 1 - s.

    Args:
        schedule: a name of :data:`NAMES`.
        workers: number of workers, or of groups of workers that share each stage.
        chunks: number of stages of each worker.

    Raises:
        ValueError: an unknown name, or chunks that the schedule does not have.
    """
    _check_name(schedule)
    if schedule == FOUND:
        schedule = "interleaved"  # stages dealt round-robin
    if schedule not in _CHUNKED:
        if chunks != 1:
            several = ", ".join(DEFAULT_CHUNKS)
            raise ValueError(f"the schedule {schedule} has one stage on a worker, not {chunks} chunks: try {several}")
        return tuple(range(workers))
    chunking = _CHUNKED[schedule]
    if chunking.fixed and chunks != chunking.default:
        raise ValueError(f"the schedule {schedule} has exactly {chunking.default} chunks on a worker, not {chunks}")
    if chunks < 1:
        raise ValueError(f"the schedule {schedule} has at least 1 chunk on a worker, not {chunks}")
    return chunking.assign(workers, chunks)


def schedule_lanes(
    schedule: str, stages: int | StageGraph, microbatches: int, workers: Sequence[int] | None = None
) -> Lanes:
    """Return the lanes of the schedule of that name, one for each worker.

    Args:
        schedule: a name of :data:`NAMES`.
        stages: number of stages of a chain, or the graph of the stages.
        microbatches: number of microbatches of a step.
        workers: the worker that has each stage, from 0; default: every stage has a worker of its own.

    Returns:
        For an asynchronous schedule, whose passes never pause, those of as many batches as are under way at once.

    Raises:
        ValueError: an unknown name, fewer than one stage or microbatch, or stages that are not on the workers that the
            schedule gives them to (:func:`assign_stages`).
    """
    _check_name(schedule)
    graph = checked_stage_graph(stages, microbatches)
    workers = tuple(range(graph.stages)) if workers is None else tuple(workers)
    count = 1 + max(workers)
    chunks, remainder = divmod(graph.stages, count)
    if remainder or workers != assign_stages(schedule, count, chunks):
        raise ValueError(f"the schedule {schedule} needs other stages on its workers than {workers}")
    if schedule in ASYNCHRONOUS:
        return one_forward_one_backward(graph, microbatches * (1 + steps_in_flight(graph, microbatches)))
    if schedule not in _CHUNKED:
        return (SCHEDULES | _SPLIT)[schedule](graph, microbatches)
    # What a chain's order waits for is all that any graph with ascending edges can wait for.
    if any(producer >= stage for stage, producers in enumerate(graph.predecessors) for producer in producers):
        raise ValueError(f"the schedule {schedule} needs stages numbered so that each reads only earlier ones")
    return _CHUNKED[schedule].build(count, chunks, microbatches)


def live_bound(
    schedule: str, stages: int | StageGraph, microbatches: int, stage: int, workers: Sequence[int] | None = None
) -> int:
    """Return the most microbatches that a stage has between the start of their forward and the end of their backward.

    Args:
        schedule, stages, microbatches, workers: what runs, as of :func:`schedule_lanes`.
        stage: the stage that is asked for.

    Raises:
        ValueError: what :func:`schedule_lanes` refuses, or a stage that does not exist.
    """
    _check_name(schedule)
    graph = checked_stage_graph(stages, microbatches)
    if not 0 <= stage < graph.stages:
        raise ValueError(f"stage must lie between 0 and {graph.stages - 1}, not {stage}")
    return max(peak_live(schedule_lanes(schedule, graph, microbatches, workers), stage))


def _check_name(schedule: str) -> None:
    if schedule not in RUNNABLE:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(RUNNABLE)}")
