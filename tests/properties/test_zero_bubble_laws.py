"""Laws of the zero-bubble schedules, for any number of stages and microbatches and any durations."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.live import peak_live
from polylane.schedule.schedules import assign_stages, schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

HALVES = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
names = st.sampled_from(["zb-h1", "zb-h2", "zb-v"])
workers = st.integers(1, 6)
microbatches = st.integers(1, 20)
ticks = st.integers(1, 9)


def lanes_of(name: str, k: int, n: int) -> tuple[Lanes, StageGraph, tuple[int, ...]]:
    """The lanes of k workers, the chain of their stages, and the worker of each."""
    owners = assign_stages(name, k, 2 if name == "zb-v" else 1)
    graph = StageGraph.chain(len(owners))
    return schedule_lanes(name, graph, n, owners), graph, owners


def played(name: str, k: int, n: int, f: int, i: int, w: int, c: int = 0) -> Timeline:
    lanes, graph, _ = lanes_of(name, k, n)
    return simulate_schedule(lanes, f, i + w, c, graph, w)


def bubbles(timeline: Timeline) -> list[float]:
    """Idle ticks of each worker between its first pass and its last one."""
    return [
        lane[-1].end - lane[0].start - busy
        for lane, busy in zip(timeline.lanes(), timeline.busy(), strict=True)
        if lane
    ]


@given(names, workers, microbatches)
def test_each_half_once_on_every_stage(name: str, k: int, n: int) -> None:
    lanes, graph, owners = lanes_of(name, k, n)
    for worker, lane in enumerate(lanes):
        own = [stage for stage in range(graph.stages) if owners[stage] == worker]
        assert Counter(lane) == Counter(Action(kind, s, m) for kind in HALVES for s in own for m in range(n))


@given(names, workers, microbatches)
def test_halves_ascend_and_follow_each_other(name: str, k: int, n: int) -> None:
    """Gradients accumulate as on one device, and F is before I, which is before W."""
    for lane in lanes_of(name, k, n)[0]:
        place = {action: number for number, action in enumerate(lane)}
        for stage in {action.stage for action in lane}:
            for kind in HALVES:
                assert [a.microbatch for a in lane if (a.kind, a.stage) == (kind, stage)] == list(range(n))
            for m in range(n):
                forward, first, second = (place[Action(kind, stage, m)] for kind in HALVES)
                assert forward < first < second


@given(names, workers, microbatches, ticks, ticks, ticks, st.integers(0, 4))
@settings(deadline=None)
def test_no_deadlock_and_inputs_arrive_before_they_are_used(
    name: str, k: int, n: int, f: int, i: int, w: int, c: int
) -> None:
    lanes, graph, owners = lanes_of(name, k, n)
    when = {span.action: span for span in simulate_schedule(lanes, f, i + w, c, graph, w).spans}
    assert len(when) == 3 * n * graph.stages
    for action, span in when.items():
        assert span.end - span.start == dict(zip(HALVES, (f, i, w), strict=True))[action.kind]
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            assert span.start >= when[Action(ActionKind.BACKWARD_INPUT, action.stage, action.microbatch)].end
            continue
        before = action.stage + (-1 if action.kind is ActionKind.FORWARD else 1)
        if 0 <= before < graph.stages:
            hop = c if owners[before] != owners[action.stage] else 0
            assert span.start >= when[Action(action.kind, before, action.microbatch)].end + hop


@given(st.integers(1, 7), st.integers(0, 12), ticks, ticks, ticks)
@example(k=4, more=4, f=1, i=1, w=1)
def test_the_bubble_of_h1(k: int, more: int, f: int, i: int, w: int) -> None:
    """(k - 1)(F + I - W) where W <= F; a longer W cannot fill the wait for the first gradient in k microbatches."""
    idle = bubbles(played("zb-h1", k, k + more, f, i, w))
    assert max(idle) == idle[0] == (k - 1) * (i + max(0, f - w))
    if w <= f:
        assert idle[0] == (k - 1) * (f + i - w)


@given(st.integers(1, 6), st.integers(0, 12), ticks, ticks, ticks)
@example(k=4, more=1, f=1, i=1, w=1)
def test_the_bubble_of_h2(k: int, more: int, f: int, i: int, w: int) -> None:
    """(k - 1) max(0, F + I - 2W), and no less than (k - 1)(I - F) before the first gradient is back."""
    idle = bubbles(played("zb-h2", k, 2 * k - 1 + more, f, i, w))
    assert max(idle) == idle[0] == (k - 1) * max(0, i - f, f + i - 2 * w)


@given(st.integers(1, 7), st.integers(0, 12), ticks)
def test_the_bubble_of_v_is_none(k: int, more: int, t: int) -> None:
    assert bubbles(played("zb-v", k, 2 * k - 1 + more, t, t, t)) == [0] * k


@given(workers, microbatches, ticks, ticks, st.integers(0, 4))
def test_live_microbatches(k: int, n: int, f: int, i: int, c: int) -> None:
    """The lane's order decides, whatever passes take: k, 2k - 1 and 2k halves, or all of fewer."""
    for name, most in (("zb-h1", k), ("zb-h2", 2 * k - 1), ("zb-v", 2 * k)):
        peaks = peak_live(lanes_of(name, k, n)[0])
        halves = 2 if name == "zb-v" else 1
        assert peaks == tuple(halves * live for live in played(name, k, n, f, i, 1, c).peak_live_microbatches())
        if name == "zb-v":
            assert max(peaks) <= min(2 * n, most) and (n < 2 * k - 1 or peaks == (most,) * k)
        else:
            assert peaks == (min(n, most),) * k


@given(st.sampled_from(["zb-h1", "zb-h2"]), workers, microbatches, ticks, ticks, ticks, st.integers(0, 4))
@settings(deadline=None)
def test_never_longer_than_1f1b(name: str, k: int, n: int, f: int, i: int, w: int, c: int) -> None:
    whole = simulate_schedule(schedule_lanes("1f1b", k, n), f, i + w, c).makespan()
    assert played(name, k, n, f, i, w, c).makespan() <= whole
    assert c or whole == (n + k - 1) * (f + i + w)


@given(workers, microbatches, ticks)
def test_v_is_never_longer_than_h1(k: int, n: int, t: int) -> None:
    """With equal thirds, two chunks of t against one stage of 2t."""
    assert played("zb-v", k, n, t, t, t).makespan() <= played("zb-h1", k, n, 2 * t, 2 * t, 2 * t).makespan()
