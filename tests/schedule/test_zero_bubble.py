"""The zero-bubble schedules, lane by lane as people draw them, and their published figures."""

from __future__ import annotations

import re

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.live import peak_live
from polylane.schedule.schedules import assign_stages, schedule_lanes, splits_backward
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from tests.support.simulated_tasks import live_bound

SIGNS = {ActionKind.FORWARD: "", ActionKind.BACKWARD_INPUT: "<", ActionKind.BACKWARD_WEIGHT: "="}


def drawn(lane: tuple[Action, ...], workers: int = 99) -> str:
    """``0 <0 =0``: a forward, an input half and a weight half by microbatch; a mark for the second chunk."""
    return " ".join(f"{SIGNS[a.kind]}{a.microbatch}{chr(39) * (a.stage >= workers)}" for a in lane)


def test_h1() -> None:
    assert [drawn(lane) for lane in zero_bubble_h1(3, 4)] == [
        "0 1 2 <0 =0 3 <1 =1 <2 =2 <3 =3",
        "0 1 <0 2 <1 =0 3 <2 =1 <3 =2 =3",
        "0 <0 1 <1 2 <2 =0 3 <3 =1 =2 =3",
    ]


def test_h2() -> None:
    assert [drawn(lane) for lane in zero_bubble_h2(3, 5)] == [
        "0 1 2 3 4 <0 =0 <1 =1 <2 =2 <3 =3 <4 =4",
        "0 1 2 <0 3 <1 4 <2 =0 <3 =1 <4 =2 =3 =4",
        "0 <0 1 <1 2 <2 3 <3 4 <4 =0 =1 =2 =3 =4",
    ]


def test_v() -> None:
    assert [drawn(lane, 2) for lane in zero_bubble_v(2, 3)] == [
        "0 1 2 0' <0' =0' 1' <1' =1' <0 =0 2' <2' =2' <1 =1 <2 =2",
        "0 0' 1 1' <0' =0' 2 <0 =0 2' <1' =1' <1 <2' <2 =1 =2' =2",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert [drawn(lane) for lane in zero_bubble_h1(3, 1)] == ["0 <0 =0"] * 3
    assert [drawn(lane) for lane in zero_bubble_h2(3, 2)] == ["0 1 <0 =0 <1 =1", "0 1 <0 <1 =0 =1", "0 <0 1 <1 =0 =1"]
    assert [drawn(lane, 2) for lane in zero_bubble_v(2, 1)] == ["0 0' <0' =0' <0 =0", "0 0' <0' =0' <0 =0"]


def test_the_busy_share_of_h1() -> None:
    """k=4, N=8, F=I=W=1: a third of the bubble of 1F1B, which takes 96 of 132."""
    timeline = simulate_schedule(zero_bubble_h1(4, 8), forward=1, backward=2)
    assert (sum(timeline.busy()), 4 * timeline.makespan()) == (96, 108)
    assert timeline.peak_live_microbatches() == (4, 4, 4, 4)


def test_h2_has_the_rectangle_of_h1_and_no_bubble() -> None:
    timeline = simulate_schedule(zero_bubble_h2(4, 8), forward=1, backward=2)
    assert timeline.makespan() == 27
    assert [(lane[0].start, lane[-1].end) for lane in timeline.lanes()] == [(s, s + 24) for s in range(4)]
    assert timeline.peak_live_microbatches() == (7, 7, 7, 7)


def test_v_has_no_bubble_in_the_memory_of_1f1b() -> None:
    timeline = simulate_schedule(zero_bubble_v(4, 8), forward=1, backward=2, graph=StageGraph.chain(8))
    assert [(lane[0].start, lane[-1].end) for lane in timeline.lanes()] == [(s, s + 48) for s in range(4)]
    assert timeline.peak_live_microbatches() == (4, 4, 4, 4)  # eight halves of a worker's microbatch


def test_weight_halves_of_another_length() -> None:
    lanes = zero_bubble_h1(3, 4)
    timeline = simulate_schedule(lanes, forward=2, backward=[4, 5, 6], weight=[1, 2, 3])
    took = {span.action: span.end - span.start for span in timeline.spans}
    for stage, (first, second) in enumerate([(3, 1), (3, 2), (3, 3)]):
        assert took[Action(ActionKind.BACKWARD_INPUT, stage, 2)] == first
        assert took[Action(ActionKind.BACKWARD_WEIGHT, stage, 2)] == second
    with pytest.raises(ValueError, match="the weight half of stage 0 takes 3 ticks, its whole backward only 2"):
        simulate_schedule(lanes, forward=1, backward=2, weight=3)


def test_a_half_before_the_one_that_it_needs() -> None:
    early = [[Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD_WEIGHT, 0, 0)]]
    says = "deadlock: the backward_weight of microbatch 0 on stage 0 waits for the backward_input of microbatch 0"
    with pytest.raises(ValueError, match=says):
        simulate_schedule(early, 1, 2)


def test_stages_may_split_their_backward_or_not() -> None:
    """A gradient comes from a whole backward pass as well as from the first half of one."""
    lanes = [schedule_lanes("1f1b", 2, 3)[0], zero_bubble_h1(2, 3)[1]]
    when = {span.action: span for span in simulate_schedule(lanes, 1, 2).spans}
    for m in range(3):
        first = when[Action(ActionKind.BACKWARD_INPUT, 1, m)]
        assert when[Action(ActionKind.BACKWARD, 0, m)].start >= first.end


def test_a_microbatch_lives_until_its_weight_half_ends() -> None:
    assert peak_live(zero_bubble_h1(4, 8)) == (4, 4, 4, 4)
    assert peak_live(zero_bubble_v(4, 8)) == (8, 8, 8, 8)
    assert peak_live(zero_bubble_v(4, 8), stage=7) == (1, 0, 0, 0)
    assert [live_bound("zb-h2", 4, 8, stage) for stage in range(4)] == [7, 7, 7, 7]


def test_the_stages_of_a_v() -> None:
    assert assign_stages("zb-v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert schedule_lanes("zb-v", 6, 4, (0, 1, 2, 2, 1, 0)) == zero_bubble_v(3, 4)
    assert [name for name in ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v") if splits_backward(name)] == [
        "zb-h1",
        "zb-h2",
        "zb-v",
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks", "says"),
    [
        ("zb-v", 1, "the schedule zb-v has exactly 2 chunks on a worker, not 1"),
        ("zb-v", 3, "the schedule zb-v has exactly 2 chunks on a worker, not 3"),
        ("zb-h1", 2, "the schedule zb-h1 has one stage on a worker, not 2 chunks: try interleaved, zb-v"),
        ("interleaved", 0, "the schedule interleaved has at least 1 chunk on a worker, not 0"),
    ],
)
def test_chunks_that_a_schedule_does_not_have(schedule: str, chunks: int, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        assign_stages(schedule, 4, chunks)


def test_stages_elsewhere() -> None:
    with pytest.raises(ValueError, match="the schedule zb-v needs other stages on its workers than"):
        schedule_lanes("zb-v", 4, 4, (0, 1, 0, 1))
    with pytest.raises(ValueError, match="the schedule interleaved needs other stages on its workers than"):
        schedule_lanes("interleaved", 3, 4, (0, 1, 0))
