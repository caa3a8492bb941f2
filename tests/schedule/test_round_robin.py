"""Replicas in turn: whose microbatches they are, in which order, and what a step takes."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_replicas, simulate_schedule
from polylane.schedule.round_robin import WARM_UPS, count_workers_ahead, replica_lanes
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes
from tests.schedule.test_synchronous import drawn

CHAIN = StageGraph.chain(2)


def lines(lanes: tuple[Lanes, ...]) -> list[list[str]]:
    return [[drawn(lane) for lane in of_replicas] for of_replicas in lanes]


def test_two_replicas_feed_one() -> None:
    lanes = replica_lanes("1f1b", CHAIN, 4, (2, 1), (0, 1))
    assert lines(lanes) == [["0 2 <0 <2", "1 3 <1 <3"], ["0 <0 1 <1 2 <2 3 <3"]]
    # Twice the time and twice the workers: the picture of the module. One worker for stage 0 would take 16.
    assert simulate_replicas(lanes, [2, 1], [2, 1], CHAIN).makespan() == 12
    assert simulate_schedule(schedule_lanes("1f1b", CHAIN, 4), [2, 1], [2, 1]).makespan() == 16


def test_naive_and_afab_with_uneven_replicas() -> None:
    assert lines(replica_lanes("naive", CHAIN, 3, (2, 1), (0, 1))) == [["0 <0 2 <2", "1 <1"], ["0 <0 1 <1 2 <2"]]
    assert lines(replica_lanes("afab", CHAIN, 3, (1, 2), (0, 1))) == [["0 1 2 <0 <1 <2"], ["0 2 <0 <2", "1 <1"]]


@pytest.mark.parametrize("schedule", ["naive", "afab", "1f1b", "zb-h1", "zb-h2", "interleaved"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_as_many_replicas_everywhere_are_pipelines_side_by_side(schedule: str, replicas: int) -> None:
    """Each has the schedule's own lanes on its microbatches, and a step takes what the longest of them takes."""
    stages, workers = (4, (0, 1, 0, 1)) if schedule == "interleaved" else (2, (0, 1))
    graph = StageGraph.chain(stages)
    lanes = replica_lanes(schedule, graph, 7, (replicas,) * stages, workers)
    times = [2] * stages, [4] * stages
    alone = [
        simulate_schedule(schedule_lanes(schedule, graph, len(range(first, 7, replicas)), workers), *times, graph=graph)
        for first in range(replicas)
    ]
    played = simulate_replicas(lanes, *times, graph)
    assert played.makespan() == max(each.makespan() for each in alone)
    for group, of_replicas in enumerate(lanes):
        for first, lane in enumerate(of_replicas):
            assert {action.microbatch for action in lane} == set(range(first, 7, replicas))
            assert played.busy()[group * replicas + first] == alone[first].busy()[group]


def test_warm_ups_are_those_of_1f1b_where_no_stage_has_replicas() -> None:
    graph = StageGraph.of_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
    assert count_workers_ahead(graph, (1,) * 4) == graph.depth_to_end
    assert count_workers_ahead(graph, (3, 1, 2, 2)) == (7, 3, 4, 2)
    assert [WARM_UPS["1f1b"](ahead, 1, 9) for ahead in graph.depth_to_end] == [2, 1, 1, 0]
    # PipeDream's number of minibatches that a replica of the first stage has under way: 7 workers over 3 replicas.
    assert WARM_UPS["1f1b"](7, 3, 9) + 1 == 3
