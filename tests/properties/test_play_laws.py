"""Laws of playing tasks, for lanes that do anything that can be done, on shared cores or their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.contention import ContentionSimulator
from polylane.cost.simulator.matching import match_lanes
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.interleaved import interleaved
from polylane.schedule.schedules import SCHEDULES, schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from tests.support import subsets
from tests.support.reference.exact_simulator import ExactPlayer

Lanes = list[list[Task]]
seconds = st.integers(0, 6)


@st.composite
def transfers(draw: st.DrawFn, shared: bool) -> TransferTime:
    cpu = draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])) if shared else 0.0
    return TransferTime(draw(seconds), draw(st.integers(0, 2)), cpu)


@st.composite
def programs(draw: st.DrawFn, shared: bool = False) -> Lanes:
    """Lanes that can be run, for they are made in an order in which they could be: whatever waits comes later."""
    count = draw(st.integers(1, 4))
    lanes: Lanes = [[] for _ in range(count)]
    inbox: list[tuple[int, Task]] = []
    for number in range(draw(st.integers(0, 25))):
        lane = draw(st.integers(0, count - 1))
        what = draw(st.sampled_from(["pass", "pass", "send", "receive", "reduce", "step"]))
        if what == "pass":
            took = draw(seconds)
            lanes[lane].append(Task(Action(ActionKind.FORWARD, lane, number), took, draw(st.integers(0, took))))
        elif what == "send":
            to = draw(st.integers(0, count - 1))
            lanes[lane].append(
                Task(
                    Action(ActionKind.SEND, lane, number, peer=to),
                    draw(st.integers(0, 1)),
                    key=number,
                    transfer=draw(transfers(shared)),
                )
            )
            inbox.append(
                (to, Task(Action(ActionKind.RECEIVE, to, number, peer=lane), draw(st.integers(0, 1)), key=number))
            )
        elif what == "receive" and inbox:
            to, task = inbox.pop(draw(st.integers(0, len(inbox) - 1)))
            lanes[to].append(task)
        elif what == "reduce":
            _reduce(draw, lanes, number, shared)
        elif what == "step":
            lanes[lane].append(Task(Action(ActionKind.STEP, lane, number), draw(seconds)))
    for to, task in inbox:
        if draw(st.booleans()):
            lanes[to].append(task)
    return lanes


def _reduce(draw: st.DrawFn, lanes: Lanes, number: int, shared: bool) -> None:
    who = tuple(sorted(draw(st.sets(st.integers(0, len(lanes) - 1), min_size=1))))
    moves = draw(transfers(shared))
    for lane in who:
        task = Task(Action(ActionKind.REDUCE, lane, value=f"w{number}"), key=number, transfer=moves, lanes=who)
        earlier = [t.action for t in lanes[lane] if t.action.kind is ActionKind.FORWARD]
        if earlier and draw(st.booleans()):
            task = replace(task, after=earlier[-1], fraction=draw(st.sampled_from([0, 0.5, 1])))
        lanes[lane].append(replace(task, overlapped=draw(st.booleans())))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[Lanes, list[SharedCores]]:
    """Lanes, with the hosts that they share."""
    lanes = draw(programs(shared=True))
    where = [draw(st.integers(0, 2)) for _ in lanes]
    hosts = [
        SharedCores(
            tuple(lane for lane, host in enumerate(where) if host == number),
            draw(st.sampled_from([0.5, 1, 2, 4])),
            draw(st.sampled_from([None, {2: 0.9}, {2: 0.8, 4: 0.5}])),
        )
        for number in (0, 1)
    ]
    return lanes, hosts


def longest_path(lanes: Lanes) -> float:
    """How long lanes that share nothing take, from a graph of what must end before what."""
    waits = nx.DiGraph()
    for lane, tasks in enumerate(lanes):
        channels: dict[object, object] = {}
        passes: dict[Action, tuple[object, Task]] = {}
        pending: list[object] = []
        waits.add_node(here := ("start", lane))
        for index, task in enumerate(tasks):
            kind, node = task.action.kind, (lane, index)
            waits.add_edge(here, node, seconds=0)
            here = (*node, "end")
            if kind in (ActionKind.SEND, ActionKind.REDUCE):
                travel = (task.key, "travel")
                asked = node if kind is ActionKind.REDUCE else here
                waits.add_node(travel, keeps=task.transfer.seconds)
                if task.after is not None:
                    before, done = passes[task.after]
                    waits.add_edge(before, travel, seconds=task.fraction * done.seconds)
                else:
                    waits.add_edge(asked, travel, seconds=0)
                channel = (kind, task.action.peer)
                if channel in channels:
                    last = channels[channel]
                    waits.add_edge(last, travel, seconds=waits.nodes[last]["keeps"])
                channels[channel] = travel
                waits.add_edge(travel, (task.key, "there"), seconds=task.transfer.seconds + task.transfer.latency)
            if kind is ActionKind.RECEIVE or (kind is ActionKind.REDUCE and not task.overlapped):
                waits.add_edge((task.key, "there"), middle := (*node, "middle"), seconds=0)
                waits.add_edge(node, middle, seconds=0)
                waits.add_edge(middle, here, seconds=task.seconds)
            else:
                waits.add_edge(node, here, seconds=task.seconds)
            if kind is ActionKind.REDUCE and task.overlapped:
                pending.append((task.key, "there"))
                waits.add_edge((task.key, "there"), ("end", task.key), seconds=0)
            if kind is ActionKind.STEP:
                waits.add_edges_from([(there, node, {"seconds": 0}) for there in pending])
                pending = []
            if kind is ActionKind.FORWARD:
                passes[task.action] = node, task
    # Only what a lane does or waits for counts: a message that nobody receives may end later.
    arrives = dict.fromkeys(waits, 0.0)
    for node in nx.topological_sort(waits):
        for after, edge in waits[node].items():
            arrives[after] = max(arrives[after], arrives[node] + edge["seconds"])
    ends = [node for node in waits if node[-1] == "end" or node[0] == "end"]
    return max((arrives[node] for node in ends), default=0)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Sequence[Sequence[Action]], StageGraph]:
    """Lanes of some schedule, virtual stages and branches included."""
    n = draw(st.integers(1, 8))
    if draw(st.booleans()):
        k, v = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        return interleaved(k, v, n), StageGraph.chain(k * v)
    stages = draw(st.integers(1, 5))
    graph = StageGraph(tuple(tuple(sorted(draw(st.sets(st.integers(0, s - 1))) if s else ())) for s in range(stages)))
    return schedule_lanes(draw(st.sampled_from(sorted(SCHEDULES))), graph, n), graph


@given(schedules(), st.integers(0, 5), st.integers(0, 5), st.integers(0, 4))
@settings(deadline=None, max_examples=subsets.examples(40))
def test_a_schedule_takes_what_theory_says(
    schedule: tuple[Sequence[Sequence[Action]], StageGraph], f: int, b: int, c: int
) -> None:
    """Every pass starts as soon as its lane is free and all that it needs has been computed and has arrived."""
    lanes, graph = schedule
    played = simulate_schedule(lanes, f, b, c, graph)
    ends = {span.action: (span.end, span.rank) for span in played.spans}
    for lane, actions in enumerate(lanes):
        free, spans = 0, [span for span in played.spans if span.rank == lane]
        assert [span.action for span in spans] == list(actions)
        for span, action in zip(spans, actions, strict=True):
            back = action.kind is ActionKind.BACKWARD
            needs = [
                replace(action, stage=other)
                for other in (graph.successors if back else graph.predecessors)[action.stage]
            ]
            needs += [replace(action, kind=ActionKind.FORWARD)] if back else []
            arrivals = [end + c * (rank != lane) for end, rank in map(ends.__getitem__, needs)]
            assert span.start == max([free, *arrivals])
            free = span.start + (b if back else f)
            assert span.end == free


@given(programs())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_lanes_that_share_nothing_take_their_longest_path(lanes: Lanes) -> None:
    assert max((span.end for span in simulate_tasks(lanes).spans), default=0) == longest_path(lanes)


@given(programs())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_events_come_to_the_same_where_there_is_enough_for_all(lanes: Lanes) -> None:
    matched = match_lanes(lanes)
    ContentionSimulator(matched.lanes, [SharedCores(tuple(range(len(lanes))), 100)]).run()
    played = simulate_tasks(lanes)
    passes = {ActionKind.FORWARD, ActionKind.STEP, ActionKind.SEND, ActionKind.RECEIVE}
    found = [(op.start, op.end) for ops in matched.lanes for op in ops if op.task.action.kind in passes]
    assert found == [(span.start, span.end) for span in played.spans if span.action.kind in passes]
    assert all(travel.arrival is not None for travel in matched.messages)


@given(crowds())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_every_moment_of_a_lane_is_one_of_four(crowd: tuple[Lanes, list[SharedCores]]) -> None:
    """And nothing that can be run is a deadlock, whatever is shared."""
    lanes, hosts = crowd
    timeline = simulate_tasks(lanes, hosts)
    assert len(timeline.spans) == sum(map(len, lanes))
    for rank in account_time(timeline).ranks:
        assert rank.computing + rank.communication + rank.bubble == pytest.approx(timeline.makespan(), abs=1e-9)
    for tasks, spans in zip(lanes, _lanes(timeline), strict=True):
        assert [span.action for span in spans] == [task.action for task in tasks]
        keeping = [
            s for s in spans if s.action.kind is not ActionKind.REDUCE
        ]  # which may move beside what comes before it
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(keeping))
        for span, task in zip(spans, tasks, strict=True):
            assert span.end - span.start >= (task.seconds or task.transfer.seconds * task.overlapped) - 1e-9


def _lanes(timeline: Timeline) -> list[list]:  # type: ignore[type-arg]
    return [[span for span in timeline.spans if span.rank == rank] for rank in range(timeline.ranks)]


@given(crowds())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_sharing_never_ends_before_the_longest_path(crowd: tuple[Lanes, list[SharedCores]]) -> None:
    lanes, hosts = crowd
    last = max((span.end for span in simulate_tasks(lanes, hosts).spans), default=0)
    assert last >= longest_path(lanes) - 1e-9


@given(crowds())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_no_host_gives_more_than_it_has(crowd: tuple[Lanes, list[SharedCores]]) -> None:
    lanes, hosts = crowd
    last = max((span.end for span in simulate_tasks(lanes, hosts).spans), default=0)
    for host in hosts:
        computed = sum(task.seconds - task.waited for lane in host.lanes for task in lanes[lane])
        assert computed <= host.cores * last + 1e-9


@given(programs(), st.data())
@settings(deadline=None, max_examples=subsets.examples(40))
def test_never_faster_with_a_slower_task_or_link_where_nothing_is_shared(lanes: Lanes, data: st.DataObject) -> None:
    """Where cores are shared this is no law: who comes later may be out of another one's way."""
    places = [(lane, index) for lane, tasks in enumerate(lanes) for index in range(len(tasks))]
    assume(places)
    lane, index = data.draw(st.sampled_from(places))
    task = lanes[lane][index]
    slower = [list(each) for each in lanes]
    if task.action.kind in (ActionKind.SEND, ActionKind.REDUCE):
        moves = replace(task.transfer, seconds=task.transfer.seconds + 3, latency=task.transfer.latency + 1)
        for each in slower:
            each[:] = [replace(t, transfer=moves) if t.transfer is task.transfer else t for t in each]
    else:
        slower[lane][index] = replace(task, seconds=task.seconds + 3)
    before, after = simulate_tasks(lanes), simulate_tasks(slower)
    assert all(late.end >= early.end for early, late in zip(before.spans, after.spans, strict=True))
    assert longest_path(slower) >= longest_path(lanes)


@given(st.lists(st.lists(seconds, max_size=4), min_size=1, max_size=5), st.integers(1, 8), st.data())
def test_more_cores_never_slow_independent_lanes(work: list[list[int]], few: int, data: st.DataObject) -> None:
    lanes = [[Task(Action(ActionKind.FORWARD, r, i), s) for i, s in enumerate(lane)] for r, lane in enumerate(work)]
    more = data.draw(st.integers(few, 9))
    table = data.draw(st.sampled_from([None, {2: 0.9, 5: 0.5}]))

    def ends(cores: int) -> list[float]:
        timeline = simulate_tasks(lanes, [SharedCores(tuple(range(len(lanes))), cores / 2, table)])
        return [max((s.end for s in lane), default=0) for lane in timeline.lanes()]

    assert all(late >= early - 1e-9 for late, early in zip(ends(few), ends(more), strict=True))


@given(st.integers(1, 8), st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_equal_lanes_on_too_few_cores_take_as_many_times_as_long(lanes: int, cores: int, work: list[int]) -> None:
    each = [Task(Action(ActionKind.FORWARD, 0, i), s) for i, s in enumerate(work)]
    timeline = simulate_tasks([each] * lanes, [SharedCores(tuple(range(lanes)), cores)])
    for lane in timeline.lanes():
        assert lane[-1].end == pytest.approx(sum(work) * max(Fraction(1), Fraction(lanes, cores)), rel=1e-12)


@given(programs(), st.integers(1, 4))
@settings(deadline=None, max_examples=subsets.examples(40))
def test_steps_in_a_row_take_no_longer_than_one_after_the_other(lanes: Lanes, steps: int) -> None:
    one, several = simulate_tasks(lanes), simulate_tasks([steps * lane for lane in lanes])
    last = max((span.end for span in one.spans), default=0)
    # Messages that nobody receives may still be under way at the end of a step.
    spare = steps * sum(task.transfer.seconds + task.transfer.latency for lane in lanes for task in lane)
    assert max((span.end for span in several.spans), default=0) <= steps * last + spare
    assert len(several.spans) == steps * len(one.spans)


@given(programs(), st.integers(1, 6))
@settings(deadline=None, max_examples=subsets.examples(40))
def test_events_agree_with_a_player_in_exact_fractions(lanes: Lanes, halves: int) -> None:
    """Cores shared by passes, beside messages of more than no time."""
    simple: Lanes = [[] for _ in lanes]
    for lane, tasks in enumerate(lanes):
        for task in tasks:
            if task.action.kind is ActionKind.FORWARD:
                simple[lane].append(Task(task.action, task.seconds + 1))
            elif task.action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
                simple[lane].append(Task(task.action, key=task.key, transfer=TransferTime(task.transfer.seconds + 1)))
    exact = ExactPlayer(simple, Fraction(halves, 2)).run()
    played = simulate_tasks(simple, [SharedCores(tuple(range(len(lanes))), halves / 2)])
    for lane, spans in enumerate(_lanes(played)):
        for index, span in enumerate(spans):
            assert span.end == pytest.approx(float(exact[lane, index]), rel=1e-9, abs=1e-9)
