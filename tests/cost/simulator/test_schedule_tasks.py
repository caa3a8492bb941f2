"""Playing lanes over durations: starts, ends, and lanes that cannot be played."""

from __future__ import annotations

from fractions import Fraction

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import SCHEDULES, schedule_lanes
from polylane.schedule.stage_graph import StageGraph


def forward(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    return Action(ActionKind.BACKWARD, stage, microbatch)


def test_two_stages_two_microbatches() -> None:
    timeline = simulate_schedule(schedule_lanes("afab", 2, 2), forward=1, backward=2)
    assert [(s.rank, str(s.action.kind), s.action.microbatch, s.start, s.end) for s in timeline.spans] == [
        (0, "forward", 0, 0, 1),
        (0, "forward", 1, 1, 2),
        (0, "backward", 0, 5, 7),
        (0, "backward", 1, 7, 9),
        (1, "forward", 0, 1, 2),
        (1, "forward", 1, 2, 3),
        (1, "backward", 0, 3, 5),
        (1, "backward", 1, 5, 7),
    ]
    assert (timeline.ranks, timeline.unit) == (2, "ticks")


@pytest.mark.parametrize(
    ("schedule", "microbatches", "utilization"),
    [
        ("naive", 1, Fraction(12, 48)),
        ("naive", 8, Fraction(12, 48)),
        ("afab", 4, Fraction(48, 84)),
        ("afab", 8, Fraction(96, 132)),
        ("1f1b", 4, Fraction(48, 84)),
        ("1f1b", 8, Fraction(96, 132)),
    ],
)
def test_utilization_of_four_stages(schedule: str, microbatches: int, utilization: Fraction) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, 4, microbatches), forward=1, backward=2)
    assert Fraction(sum(timeline.busy())) / (4 * Fraction(timeline.makespan())) == utilization
    assert timeline.utilization() == pytest.approx(float(utilization), abs=1e-15)


@pytest.mark.parametrize(("schedule", "makespan"), [("afab", 39), ("1f1b", 49)])
def test_a_hop_costs_1f1b_more(schedule: str, makespan: int) -> None:
    assert simulate_schedule(schedule_lanes(schedule, 4, 8), 1, 2, hop=1).makespan() == makespan


def test_whole_durations_stay_whole() -> None:
    timeline = simulate_schedule(schedule_lanes("1f1b", 3, 5), forward=[1, 2, 3], backward=2)
    assert all(type(span.start) is int and type(span.end) is int for span in timeline.spans)


def test_fractions_of_a_tick() -> None:
    assert simulate_schedule(schedule_lanes("naive", 2, 1), forward=0.25, backward=0.5, hop=0.125).makespan() == 1.75


def test_the_order_of_a_lane_is_kept_though_another_would_be_faster() -> None:
    lanes = [[forward(0, 0), forward(0, 1), backward(0, 1), backward(0, 0)]]
    timeline = simulate_schedule(lanes, 1, 1)
    assert [span.action for span in timeline.spans] == lanes[0]
    assert [span.start for span in timeline.spans] == [0, 1, 2, 3]


def test_no_stage_and_an_empty_lane() -> None:
    assert simulate_schedule([], 1, 1).spans == ()
    assert simulate_schedule([[], []], 1, 1).ranks == 2


def test_a_deadlock_names_the_blocked_action() -> None:
    lanes = [[backward(0, 0), forward(0, 0)]]
    with pytest.raises(ValueError) as error:
        simulate_schedule(lanes, 1, 1)
    assert str(error.value) == (
        "deadlock: the backward of microbatch 0 on stage 0 waits for the forward of microbatch 0 on stage 0, "
        "which does not come before it"
    )


def test_a_deadlock_between_stages() -> None:
    lanes = [
        [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)],
        [forward(1, 0), forward(1, 1), backward(1, 0), backward(1, 1)],
    ]
    with pytest.raises(
        ValueError,
        match="deadlock: the backward of microbatch 0 on stage 0 in lane 0 waits for the backward of microbatch 0 on "
        "stage 1, which is itself blocked",
    ):
        simulate_schedule(lanes, 1, 1)


def test_a_missing_action_is_named() -> None:
    with pytest.raises(
        ValueError,
        match="the forward of microbatch 3 on stage 1 in lane 1 waits for the forward of microbatch 3 on stage 0, "
        "which no lane has",
    ):
        simulate_schedule([[], [forward(1, 3)]], 1, 1)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([[forward(1, 0)]], "lane 0 holds the forward of microbatch 0 on stage 1: it belongs in lane 1"),
        ([[forward(0, 0), forward(0, 0)]], "lane 0 holds the forward of microbatch 0 on stage 0 twice"),
        ([[Action(ActionKind.STEP, 0)]], "forwards and backwards of a microbatch only"),
        ([[Action(ActionKind.FORWARD, 0)]], "forwards and backwards of a microbatch only"),
    ],
)
def test_lanes_that_mean_nothing_are_refused(lanes: list[list[Action]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_schedule(lanes, 1, 1)


@pytest.mark.parametrize(
    ("forward", "backward", "hop", "message"),
    [
        (-1, 1, 0, "forward must be a duration of at least 0 ticks, not -1"),
        (1, float("nan"), 0, "backward must be a duration"),
        (1, float("inf"), 0, "backward must be a duration"),
        (1, 1, -2, "hop must be a duration"),
        ([1, 2, 3], 1, 0, "forward names 3 durations for 2 stages"),
    ],
)
def test_durations_that_mean_nothing_are_refused(forward: float, backward: float, hop: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_schedule(schedule_lanes("naive", 2, 1), forward, backward, hop)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_never_waits(schedule: str) -> None:
    timeline = simulate_schedule(schedule_lanes(schedule, 1, 5), 1, 2)
    assert (timeline.makespan(), timeline.utilization()) == (15, 1.0)


def test_branches_wait_for_all_that_they_read() -> None:
    graph = StageGraph(((), (0,), (0, 1)))
    timeline = simulate_schedule(schedule_lanes("afab", graph, 1), [1, 2, 3], 1, hop=10, graph=graph)
    starts = {(str(span.action.kind), span.rank): span.start for span in timeline.spans}
    assert starts["forward", 1] == 11
    assert starts["forward", 2] == 23
    assert starts["backward", 0] == 48


def test_nothing_moves_between_virtual_stages_of_one_lane() -> None:
    lane = [forward(0, 0), forward(1, 0), backward(1, 0), backward(0, 0)]
    timeline = simulate_schedule([lane], 1, 2, hop=5, graph=StageGraph.chain(2))
    assert [span.start for span in timeline.spans] == [0, 1, 2, 4]
