"""Laws of schedules over stages that branch and meet: no wait in a circle, the bounds kept, a chain where it is one."""

from __future__ import annotations

import itertools

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import SCHEDULES, schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from tests.support.simulated_tasks import live_bound

schedules = st.sampled_from(sorted(SCHEDULES))
ticks = st.integers(1, 9)


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Any graph without circles of up to 7 stages, its numbers in any order."""
    stages = draw(st.integers(1, 7))
    name = draw(st.permutations(range(stages)))
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return StageGraph.of_edges(stages, [(name[a], name[b]) for a, b in edges])


@given(st.integers(1, 9))
def test_a_chain_is_its_number(k: int) -> None:
    chain = StageGraph.chain(k)
    assert chain.depth_to_end == tuple(k - s for s in range(k))
    for schedule in SCHEDULES:
        assert schedule_lanes(schedule, chain, 5) == schedule_lanes(schedule, k, 5)


@given(graphs())
def test_depth_is_the_longest_way_to_the_end(graph: StageGraph) -> None:
    drawn = nx.DiGraph([(b, s) for s, others in enumerate(graph.predecessors) for b in others])
    drawn.add_nodes_from(range(graph.stages))
    for stage in range(graph.stages):
        ahead = drawn.subgraph(nx.descendants(drawn, stage) | {stage})
        assert graph.depth_to_end[stage] == 1 + nx.dag_longest_path_length(ahead)


@given(schedules, graphs(), st.integers(1, 12), ticks, ticks, st.integers(0, 4))
@settings(deadline=None)
def test_every_schedule_ends_within_its_bounds(
    schedule: str, graph: StageGraph, n: int, f: int, b: int, c: int
) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, graph, n), f, b, c, graph)
    when = {span.action: (span.start, span.end) for span in timeline.spans}
    assert len(when) == 2 * n * graph.stages
    for action, (start, _) in when.items():
        forward = action.kind is ActionKind.FORWARD
        for other in (graph.predecessors if forward else graph.successors)[action.stage]:
            assert start >= when[Action(action.kind, other, action.microbatch)][1] + c
    peaks = timeline.peak_live_microbatches()
    assert peaks == tuple(live_bound(schedule, graph, n, stage) for stage in range(graph.stages))


@given(graphs(), st.integers(1, 12), ticks, ticks)
@settings(deadline=None)
def test_branches_take_no_longer_than_their_longest_way(graph: StageGraph, n: int, f: int, b: int) -> None:
    """All branches run at the same time: the step is as long as that of a chain of the longest way."""
    expected = (n + max(graph.depth_to_end) - 1) * (f + b)
    assert simulate_schedule(schedule_lanes("afab", graph, n), f, b, 0, graph).makespan() == expected
    assert simulate_schedule(schedule_lanes("1f1b", graph, n), f, b, 0, graph).makespan() == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_a_circle_is_named(edges: list[tuple[int, int]]) -> None:
    if nx.is_directed_acyclic_graph(nx.DiGraph(edges)):
        StageGraph.of_edges(5, edges)
        return
    with pytest.raises(ValueError, match="wait for each other") as caught:
        StageGraph.of_edges(5, edges)
    circle = [int(s) for s in str(caught.value).split(" wait")[0].removeprefix("stages ").split(" -> ")]
    assert circle[0] == circle[-1] and all(pair in edges for pair in itertools.pairwise(circle))
