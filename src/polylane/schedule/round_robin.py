"""Replicas in turn: the order of passes of every replica of a stage, where each computes whole microbatches.

Replica r of a stage with d replicas has microbatches r, r + d, r + 2d, ..., forward and backward. Stages may have
different numbers of replicas. With two replicas of stage 0 and one of stage 1, whose passes take half as long:

           0  1  2  3  4  5  6  7  8  9 10 11
    0.0    0  0  2  2 <0 <0  ·  · <2 <2  ·  ·
    0.1    1  1  3  3  ·  · <1 <1  ·  · <3 <3
    1      ·  ·  0 <0  1 <1  2 <2  3 <3  ·  ·

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3
("1F1B-RR", deterministic round robin).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from polylane.schedule.action import Action
from polylane.schedule.schedules import KINDS, schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes, warmed_up

# Schedules whose stages may have different numbers of replicas in turn, with what :class:`ScheduleKind` calls warm-up.
WARM_UPS = {name: kind.warm_up for name, kind in KINDS.items() if kind.warm_up is not None}


def replica_lanes(
    schedule: str, graph: StageGraph, microbatches: int, replicas: Sequence[int], workers: Sequence[int]
) -> tuple[Lanes, ...]:
    """Return for every group of workers the lanes of its replicas.

    Args:
        schedule: name of the schedule; one of :data:`WARM_UPS` if numbers of replicas differ.
        graph: the graph of the stages.
        microbatches: number of microbatches of a step, at least as many as a stage has replicas.
        replicas: number of replicas of every stage.
        workers: the group of workers that has each stage, from 0.
    """
    if len(set(replicas)) == 1:
        # Replicas with the same number are a pipeline of their own, on every replicas[0]-th microbatch.
        count = replicas[0]
        of_replica = [
            [
                renumber(lane, replica, count)
                for lane in schedule_lanes(schedule, graph, len(range(replica, microbatches, count)), workers)
            ]
            for replica in range(count)
        ]
        return tuple(zip(*of_replica, strict=True))
    ahead = count_workers_ahead(graph, replicas)
    groups = list[Lanes]()
    for stage, count in enumerate(replicas):
        lanes = list[tuple[Action, ...]]()
        for replica in range(count):
            share = len(range(replica, microbatches, count))
            warm_up = [WARM_UPS[schedule](ahead[stage], count, share)] * graph.stages
            lanes.append(renumber(warmed_up(graph, share, warm_up)[stage], replica, count))
        groups.append(tuple(lanes))
    return tuple(groups)


def renumber(lane: Sequence[Action], first: int, count: int) -> tuple[Action, ...]:
    """Return a lane whose i-th microbatch is ``first + i * count``: the turns of one of ``count`` replicas."""
    return tuple(
        action if action.microbatch is None else replace(action, microbatch=first + action.microbatch * count)
        for action in lane
    )


def count_workers_ahead(graph: StageGraph, replicas: Sequence[int]) -> tuple[int, ...]:
    """Return for every stage the number of replicas on the path from it to the end that has most, its own included."""
    counts: dict[int, int] = {}
    for stage in TopologicalSorter(dict(enumerate(graph.successors))).static_order():
        counts[stage] = replicas[stage] + max((counts[successor] for successor in graph.successors[stage]), default=0)
    return tuple(counts[stage] for stage in range(graph.stages))
