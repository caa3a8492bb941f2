"""Laws of interleaved 1F1B, for any number of ranks, chunks and microbatches and any durations."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.interleaved import interleaved
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import one_forward_one_backward
from tests.support.simulated_tasks import interleaved_live_bound

ranks = st.integers(1, 6)
chunks = st.integers(1, 4)
microbatches = st.integers(1, 20)
ticks = st.integers(1, 9)


def played(k: int, v: int, n: int, f: int, b: int, c: int = 0) -> Timeline:
    return simulate_schedule(interleaved(k, v, n), f, b, c, StageGraph.chain(k * v))


@given(ranks, chunks, microbatches)
def test_each_microbatch_once_forward_and_once_backward_on_every_virtual_stage(k: int, v: int, n: int) -> None:
    lanes = interleaved(k, v, n)
    assert len(lanes) == k
    for rank, lane in enumerate(lanes):
        stages = range(rank, k * v, k)
        assert Counter(lane) == Counter(
            Action(kind, s, m) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for s in stages for m in range(n)
        )


@given(ranks, chunks, microbatches)
def test_gradients_accumulate_in_ascending_order(k: int, v: int, n: int) -> None:
    for lane in interleaved(k, v, n):
        for stage in {action.stage for action in lane}:
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                assert [a.microbatch for a in lane if (a.kind, a.stage) == (kind, stage)] == list(range(n))


@given(ranks, chunks, microbatches, ticks, ticks)
@example(k=4, v=2, n=8, f=1, b=2)
@example(k=4, v=3, n=7, f=1, b=2)  # rounds of 7
@example(k=4, v=3, n=11, f=1, b=2)  # rounds of 6 and 5
@example(k=5, v=2, n=3, f=2, b=1)  # fewer than ranks
def test_makespan(k: int, v: int, n: int, f: int, b: int) -> None:
    """(vN + k - 1)(F + B)/v, in ticks of one chunk; of fewer microbatches than ranks (vk + N - 1)(F + B)/v."""
    timeline = played(k, v, n, f, b)
    assert timeline.makespan() == (v * max(n, k) + min(n, k) - 1) * (f + b)
    assert timeline.busy() == (n * v * (f + b),) * k


@given(ranks, chunks, microbatches, ticks, ticks, st.integers(0, 4))
def test_live_microbatches_reach_the_bound_and_never_pass_it(k: int, v: int, n: int, f: int, b: int, c: int) -> None:
    peaks = played(k, v, n, f, b, c).peak_live_microbatches()
    assert tuple(v * live for live in peaks) == tuple(interleaved_live_bound(k, v, n, rank) for rank in range(k))


@given(ranks, st.integers(2, 4), st.integers(2, 4))
def test_the_first_rank_holds_a_share_of_a_microbatch_more_than_there_are_ranks(k: int, v: int, rounds: int) -> None:
    assert interleaved_live_bound(k, v, rounds * k, 0) == v * k + k - 1


@given(ranks, chunks, microbatches, ticks, ticks, st.integers(0, 4))
def test_inputs_arrive_before_they_are_used(k: int, v: int, n: int, f: int, b: int, c: int) -> None:
    when = {span.action: span for span in played(k, v, n, f, b, c).spans}
    assert len(when) == 2 * n * k * v
    for action, span in when.items():
        forward = action.kind is ActionKind.FORWARD
        assert (span.rank, span.end - span.start) == (action.stage % k, f if forward else b)
        before = action.stage + (-1 if forward else 1)
        if 0 <= before < k * v:
            hop = c if k > 1 else 0
            assert span.start >= when[Action(action.kind, before, action.microbatch)].end + hop
        if not forward:
            assert span.start >= when[Action(ActionKind.FORWARD, action.stage, action.microbatch)].end


@given(ranks, st.integers(2, 4), microbatches, ticks, ticks)
def test_never_longer_than_1f1b_of_as_many_ranks(k: int, v: int, n: int, f: int, b: int) -> None:
    whole = simulate_schedule(one_forward_one_backward(k, n), v * f, v * b).makespan()
    assert played(k, v, n, f, b).makespan() <= whole
