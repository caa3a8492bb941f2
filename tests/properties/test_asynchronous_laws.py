"""Laws of the asynchronous schedules: which weights each pass sees, how many are kept, and that nobody waits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.inspection.schedule_report import steady_utilization
from polylane.schedule.action import ActionKind
from polylane.schedule.asynchronous import AsynchronousRun, pipedream, pipedream_2bw
from polylane.schedule.synchronous import one_forward_one_backward

stages = st.integers(1, 6)
microbatches = st.integers(1, 20)
ticks = st.integers(1, 9)


@st.composite
def runs(draw: st.DrawFn) -> AsynchronousRun:
    k = draw(stages)
    if draw(st.booleans()):
        return pipedream(k, draw(microbatches), draw(st.booleans()))
    return pipedream_2bw(k, draw(st.integers(max(1, k - 1), 8)), draw(st.integers(1, 4)))


@given(runs())
def test_a_version_is_there_when_it_is_used(run: AsynchronousRun) -> None:
    """Both passes of a microbatch see the same weights, which have been computed by then."""
    for lane, versions in zip(run.lanes, run.versions, strict=True):
        newest = 0
        for action in lane:
            newest += action.kind is ActionKind.STEP
            if action.kind is ActionKind.FORWARD:
                assert action.microbatch is not None and versions[action.microbatch] <= newest
        assert newest == len(versions) // run.accumulated


@given(stages, microbatches)
def test_stashing_takes_the_newest(k: int, n: int) -> None:
    run = pipedream(k, n)
    for stage, lane in enumerate(run.lanes):
        newest = 0
        for action in lane:
            newest += action.kind is ActionKind.STEP
            if action.kind is ActionKind.FORWARD:
                assert action.microbatch is not None
                assert run.versions[stage][action.microbatch] == newest
                assert newest == max(0, action.microbatch - (k - 1 - stage))


@given(stages, st.integers(0, 12))
def test_versions_kept_and_missing(k: int, more: int) -> None:
    """k - s versions with stashing, k with vertical sync, 2 with double buffering; from microbatch 2k - 1 on."""
    n = 2 * k - 1 + more
    assert pipedream(k, n).peak_versions() == tuple(k - s for s in range(k))
    assert pipedream(k, n).staleness() == tuple(k - 1 - s for s in range(k))
    assert pipedream(k, n, vertical_sync=True).peak_versions() == (k,) * k
    assert pipedream(k, n, vertical_sync=True).staleness() == (k - 1,) * k
    double = pipedream_2bw(k, max(1, k - 1) + more, 3)
    assert double.peak_versions() == (2,) * k
    assert double.staleness() == (1,) * k


@given(stages, microbatches, ticks, ticks)
@settings(deadline=None)
def test_a_full_pipeline_has_no_bubble(k: int, n: int, f: int, b: int) -> None:
    """It takes as long as 1F1B of all microbatches in one step, and is fully busy between fill and drain."""
    timeline = simulate_schedule(pipedream(k, n).lanes, f, b)
    assert timeline.makespan() == simulate_schedule(one_forward_one_backward(k, n), f, b).makespan()
    assert steady_utilization(timeline) in (None, 1)
