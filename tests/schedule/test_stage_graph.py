"""Graphs of stages: what is refused, and in which words."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.graph.partition import Partition
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import CyclicStages, StageGraph
from tests.support.synthetic_graphs import chain


@pytest.mark.parametrize("edge", [(0, 3), (3, 0), (-1, 0), (0, -1)])
def test_an_edge_out_of_range(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"^no edge can go from stage {edge[0]} to {edge[1]}: stages are 0 to 2$"):
        StageGraph.of_edges(3, [(0, 1), edge])


def test_a_stage_before_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="stage 1 comes after stage 7, which is not there"):
        StageGraph(((), (7,)))


def test_who_waits_in_a_circle_is_known() -> None:
    with pytest.raises(CyclicStages, match=r"^stages 1 -> 2 -> 1 wait for each other$") as caught:
        StageGraph.of_edges(3, [(0, 1), (1, 2), (2, 1)])
    assert caught.value.stages == (1, 2, 1)


def test_of_a_partition() -> None:
    """A skip past the middle."""
    cut = Partition(chain(6, skips=[(1, 5)]), (2, 4))
    assert StageGraph.of_partition(cut) == StageGraph(((), (0,), (0, 1)))


def test_another_graph_than_the_lanes() -> None:
    with pytest.raises(ValueError, match="the graph has 2 stages, there are 3 lanes"):
        simulate_schedule(schedule_lanes("afab", 3, 1), 1, 1, 0, StageGraph.chain(2))
