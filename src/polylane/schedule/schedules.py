"""Schedules by name: one row for each, with its lanes, the stages of its workers, and its estimates.

A schedule is added by its row in :data:`KINDS`: the names that plans and the command line take, those that a search
compares, and their descriptions are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polylane.schedule import estimates
from polylane.schedule.asynchronous import steps_in_flight
from polylane.schedule.estimates import StageSeconds
from polylane.schedule.interleaved import interleaved
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import (
    Lanes,
    all_forward_all_backward,
    checked_stage_graph,
    naive,
    one_forward_one_backward,
)
from polylane.schedule.zero_bubble import v_stages, zero_bubble_h1, zero_bubble_h2, zero_bubble_v

Build = Callable[[StageGraph, int, int, int], Lanes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """One schedule: the order of every worker's passes, and what is known of it.

    Attributes:
        name: how plans call it, as in ``schedule=NAME``.
        build: (graph of the stages, workers, chunks, microbatches) -> lanes of the workers.
        step_seconds: estimates the seconds of a step, see :mod:`.estimates`.
        live: estimates how many microbatches every worker holds, see :mod:`.estimates`.
        rank: place among those that a search compares unasked, the plainest first; None: it is not compared.
        is_lean: whether it holds no more microbatches than 1F1B's first worker.
        chunks: numbers of stages of a worker that a search tries, the usual one first; (1,): it has one stage.
        has_any_chunks: whether a worker may have other numbers of them.
        assign: (workers, chunks) -> the worker of each stage.
        splits_backward: whether a backward pass is in two halves: input gradients, then weight gradients.
        is_asynchronous: whether there is no flush between steps: a batch is under way in several of them.
        warm_up: where stages may have different numbers of replicas in turn: (workers on the longest path from a stage
            to the end, replicas of the stage, microbatches of a replica) -> forwards that a replica runs ahead of its
            first backward, beside the one of that backward; None: all stages have as many replicas.
        min_microbatches: (stages) -> fewest microbatches of a replica in turn; 0: no bound of its own.
    """

    name: str
    build: Build
    step_seconds: Callable[[StageSeconds, int, int], float]
    live: Callable[..., Any] = estimates.live_ahead
    rank: int | None = None
    is_lean: bool = False
    chunks: tuple[int, ...] = (1,)
    has_any_chunks: bool = False
    assign: Callable[[int, int], tuple[int, ...]] = lambda workers, chunks: tuple(range(workers))
    splits_backward: bool = False
    is_asynchronous: bool = False
    warm_up: Callable[[int, int, int], int] | None = None
    min_microbatches: Callable[[int], int] = lambda stages: 0


def _deal_stages(workers: int, chunks: int) -> tuple[int, ...]:
    return tuple(stage % workers for stage in range(workers * chunks))


def _build_in_flight(graph: StageGraph, workers: int, chunks: int, microbatches: int) -> Lanes:
    """Return the lanes of as many batches as are under way at once: passes never pause between batches."""
    return one_forward_one_backward(graph, microbatches * (1 + steps_in_flight(graph, microbatches)))


KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            name="naive",
            build=lambda graph, workers, chunks, microbatches: naive(graph, microbatches),
            step_seconds=estimates.naive_seconds,
            live=estimates.live_one,
            warm_up=lambda ahead, replicas, microbatches: 0,
        ),
        ScheduleKind(
            name="afab",
            build=lambda graph, workers, chunks, microbatches: all_forward_all_backward(graph, microbatches),
            step_seconds=estimates.all_forward_seconds,
            live=estimates.live_all,
            rank=3,
            warm_up=lambda ahead, replicas, microbatches: microbatches,
        ),
        ScheduleKind(
            name="1f1b",
            build=lambda graph, workers, chunks, microbatches: one_forward_one_backward(graph, microbatches),
            step_seconds=estimates.one_f_one_b_seconds,
            rank=0,
            # The number of microbatches that the path ahead can hold, divided over the replicas (PipeDream's NOAM for
            # the first stage): every stage has started at least one more than any that it feeds, so that no two wait
            # for each other.
            warm_up=lambda ahead, replicas, microbatches: min(-(-ahead // replicas) - 1, microbatches),
        ),
        ScheduleKind(
            name="interleaved",
            build=lambda graph, workers, chunks, microbatches: interleaved(workers, chunks, microbatches),
            step_seconds=estimates.interleaved_seconds,
            live=estimates.live_interleaved,
            rank=5,
            chunks=(2, 4),
            has_any_chunks=True,
            assign=_deal_stages,
        ),
        ScheduleKind(
            name="zb-h1",
            build=lambda graph, workers, chunks, microbatches: zero_bubble_h1(graph, microbatches),
            step_seconds=estimates.zero_bubble_h1_seconds,
            live=estimates.live_workers,
            rank=1,
            is_lean=True,
            splits_backward=True,
        ),
        ScheduleKind(
            name="zb-h2",
            build=lambda graph, workers, chunks, microbatches: zero_bubble_h2(graph, microbatches),
            step_seconds=estimates.zero_bubble_h2_seconds,
            live=estimates.live_twice,
            rank=2,
            splits_backward=True,
        ),
        ScheduleKind(
            name="zb-v",
            build=lambda graph, workers, chunks, microbatches: zero_bubble_v(workers, microbatches),
            step_seconds=estimates.zero_bubble_v_seconds,
            live=estimates.live_workers,
            rank=4,
            is_lean=True,
            chunks=(2,),
            assign=lambda workers, chunks: v_stages(workers),
            splits_backward=True,
        ),
        ScheduleKind(
            name="pipedream",
            build=_build_in_flight,
            step_seconds=estimates.asynchronous_seconds,
            is_asynchronous=True,
        ),
        ScheduleKind(
            name="pipedream-2bw",
            build=_build_in_flight,
            step_seconds=estimates.asynchronous_seconds,
            is_asynchronous=True,
            min_microbatches=lambda stages: stages - 1,
        ),
    )
}

# The schedule that is found for a plan's times, see `polylane.schedule.search`: its order is in the plan.
FOUND = "auto"

# Names in the order in which they are shown: those with a flush between steps; those without, of
# `polylane.schedule.asynchronous`; all that a plan may have.
NAMES = tuple(name for name, kind in KINDS.items() if not kind.is_asynchronous)
ASYNCHRONOUS = tuple(name for name, kind in KINDS.items() if kind.is_asynchronous)
RUNNABLE = (*KINDS, FOUND)

# One of these names, as a type: for a checker any text, for pydantic and the command line these values.
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[RUNNABLE]

# Schedules in which a worker may have several stages, its chunks, with the chunks of a worker if none are asked for.
DEFAULT_CHUNKS = {name: kind.chunks[0] for name, kind in KINDS.items() if kind.chunks != (1,)}
WITH_CHUNKS = (*DEFAULT_CHUNKS, FOUND)

# Schedules in which every worker has one stage, and a backward pass is one action.
SCHEDULES = tuple(name for name in NAMES if name not in DEFAULT_CHUNKS and not KINDS[name].splits_backward)


def splits_backward(schedule: str) -> bool:
    """Return whether the schedule runs backward passes in two halves: input gradients, then weight gradients.

    Raises:
        ValueError: no schedule has that name.
    """
    _check_name(schedule)
    return schedule in KINDS and KINDS[schedule].splits_backward


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
    kind = None if schedule == FOUND else KINDS[schedule]
    if kind is not None and kind.chunks == (1,):
        if chunks != 1:
            several = ", ".join(DEFAULT_CHUNKS)
            raise ValueError(f"the schedule {schedule} has one stage on a worker, not {chunks} chunks: try {several}")
    elif kind is not None and not kind.has_any_chunks and chunks != kind.chunks[0]:
        raise ValueError(f"the schedule {schedule} has exactly {kind.chunks[0]} chunks on a worker, not {chunks}")
    elif chunks < 1:
        raise ValueError(f"the schedule {schedule} has at least 1 chunk on a worker, not {chunks}")
    return _deal_stages(workers, chunks) if kind is None else kind.assign(workers, chunks)


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
    kind = KINDS[schedule]
    # Of chunks the order is a chain's: what that waits for is all that any graph with ascending edges can wait for.
    ascends = all(producer < stage for stage, producers in enumerate(graph.predecessors) for producer in producers)
    if kind.chunks != (1,) and not ascends:
        raise ValueError(f"the schedule {schedule} needs stages numbered so that each reads only earlier ones")
    return kind.build(graph, count, chunks, microbatches)


def _check_name(schedule: str) -> None:
    if schedule not in RUNNABLE:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(RUNNABLE)}")
