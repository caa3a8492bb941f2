"""Laws of the synchronous schedules, for any number of stages and microbatches and any durations."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import SCHEDULES, schedule_lanes
from tests.support import subsets
from tests.support.simulated_tasks import live_bound

schedules = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 7)
microbatches = st.integers(1, 20)
ticks = st.integers(1, 9)
hops = st.integers(0, 4)


def ends(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    return {span.action: (span.start, span.end) for span in timeline.spans}


@given(schedules, stages, microbatches)
def test_each_microbatch_once_forward_and_once_backward_on_every_stage(schedule: str, k: int, n: int) -> None:
    lanes = schedule_lanes(schedule, k, n)
    assert len(lanes) == k
    for stage, lane in enumerate(lanes):
        every = {Action(kind, stage, m) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for m in range(n)}
        assert len(lane) == 2 * n
        assert set(lane) == every


@given(schedules, stages, microbatches)
def test_gradients_accumulate_in_ascending_order(schedule: str, k: int, n: int) -> None:
    for lane in schedule_lanes(schedule, k, n):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert [action.microbatch for action in lane if action.kind is kind] == list(range(n))


@given(schedule=schedules, k=stages, n=microbatches, f=ticks, b=ticks, c=hops)
@example(schedule="1f1b", k=5, n=2, f=1, b=2, c=0)  # N < k
@example(schedule="afab", k=4, n=4, f=3, b=1, c=1)  # N = k
@example(schedule="1f1b", k=3, n=60, f=1, b=1, c=2)  # N >> k
def test_inputs_arrive_before_they_are_used(schedule: str, k: int, n: int, f: int, b: int, c: int) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, k, n), f, b, c)
    when = ends(timeline)
    for action, (start, end) in when.items():
        forward = action.kind is ActionKind.FORWARD
        assert end - start == (f if forward else b)
        before = action.stage + (-1 if forward else 1)
        if 0 <= before < k:
            assert start >= when[Action(action.kind, before, action.microbatch)][1] + c
        if not forward:
            assert start >= when[Action(ActionKind.FORWARD, action.stage, action.microbatch)][1]
    for lane, order in zip(timeline.lanes(), schedule_lanes(schedule, k, n), strict=True):
        assert tuple(span.action for span in lane) == order
        assert all(one.end <= following.start for one, following in pairwise(lane))


@given(schedule=schedules, k=stages, n=microbatches, f=ticks, b=ticks, c=hops)
@example(schedule="1f1b", k=5, n=2, f=1, b=2, c=0)  # N < k
@example(schedule="afab", k=4, n=4, f=3, b=1, c=1)  # N = k
@example(schedule="1f1b", k=3, n=60, f=1, b=1, c=2)  # N >> k
def test_live_microbatches_reach_the_bound_and_never_pass_it(
    schedule: str, k: int, n: int, f: int, b: int, c: int
) -> None:
    peaks = simulate_schedule(schedule_lanes(schedule, k, n), f, b, c).peak_live_microbatches()
    assert peaks == tuple(live_bound(schedule, k, n, stage) for stage in range(k))


@given(stages, microbatches, ticks, ticks, hops)
def test_makespan_of_naive(k: int, n: int, f: int, b: int, c: int) -> None:
    assert simulate_schedule(schedule_lanes("naive", k, n), f, b, c).makespan() == n * (k * (f + b) + 2 * (k - 1) * c)


@given(stages, microbatches, ticks, ticks, hops)
def test_makespan_of_all_forward_all_backward(k: int, n: int, f: int, b: int, c: int) -> None:
    assert (
        simulate_schedule(schedule_lanes("afab", k, n), f, b, c).makespan() == (n + k - 1) * (f + b) + 2 * (k - 1) * c
    )


@given(stages, microbatches, ticks, ticks)
def test_makespan_of_one_forward_one_backward(k: int, n: int, f: int, b: int) -> None:
    assert simulate_schedule(schedule_lanes("1f1b", k, n), f, b).makespan() == (n + k - 1) * (f + b)


@given(st.lists(st.tuples(ticks, ticks), min_size=1, max_size=7), microbatches)
def test_makespan_of_all_forward_all_backward_on_unequal_stages(durations: list[tuple[int, int]], n: int) -> None:
    forward, backward = [f for f, _ in durations], [b for _, b in durations]
    expected = sum(forward) + (n - 1) * max(forward) + sum(backward) + (n - 1) * max(backward)
    assert simulate_schedule(schedule_lanes("afab", len(durations), n), forward, backward).makespan() == expected


@given(schedules, stages, microbatches, ticks, ticks)
def test_utilization_is_exact(schedule: str, k: int, n: int, f: int, b: int) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, k, n), f, b)
    assert timeline.busy() == (n * (f + b),) * k
    expected = Fraction(1, k) if schedule == "naive" else Fraction(n, n + k - 1)
    assert Fraction(sum(timeline.busy())) / (k * Fraction(timeline.makespan())) == expected


@given(schedules, stages, microbatches, ticks, ticks, hops)
@settings(max_examples=subsets.examples(50))
def test_a_file_gives_back_the_timeline(schedule: str, k: int, n: int, f: int, b: int, c: int) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, k, n), f, b, c)
    assert Timeline.from_dict(timeline.to_dict()) == timeline
