"""The synchronous schedules, lane by lane as people draw them."""

from __future__ import annotations

import pytest

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import SCHEDULES, schedule_lanes
from polylane.schedule.synchronous import all_forward_all_backward, naive, one_forward_one_backward
from tests.support.simulated_tasks import live_bound


def drawn(lane: tuple[Action, ...]) -> str:
    """``0 1 <0 <1``: a forward by its microbatch, a backward by ``<`` and its microbatch."""
    return " ".join(f"{'' if a.kind is ActionKind.FORWARD else '<'}{a.microbatch}" for a in lane)


def test_naive() -> None:
    assert [drawn(lane) for lane in naive(3, 2)] == ["0 <0 1 <1"] * 3


def test_all_forward_all_backward() -> None:
    assert [drawn(lane) for lane in all_forward_all_backward(3, 4)] == ["0 1 2 3 <0 <1 <2 <3"] * 3


def test_one_forward_one_backward() -> None:
    assert [drawn(lane) for lane in one_forward_one_backward(3, 4)] == [
        "0 1 2 <0 3 <1 <2 <3",
        "0 1 <0 2 <1 3 <2 <3",
        "0 <0 1 <1 2 <2 3 <3",
    ]


def test_one_forward_one_backward_with_fewer_microbatches_than_stages() -> None:
    assert [drawn(lane) for lane in one_forward_one_backward(4, 2)] == ["0 1 <0 <1"] * 3 + ["0 <0 1 <1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_are_forwards_and_backwards_of_their_own_stage(schedule: str) -> None:
    for stage, lane in enumerate(schedule_lanes(schedule, 4, 8)):
        assert {action.stage for action in lane} == {stage}
        assert {action.kind for action in lane} == {ActionKind.FORWARD, ActionKind.BACKWARD}


def test_live_bounds() -> None:
    assert [live_bound("naive", 4, 8, stage) for stage in range(4)] == [1, 1, 1, 1]
    assert [live_bound("afab", 4, 8, stage) for stage in range(4)] == [8, 8, 8, 8]
    assert [live_bound("1f1b", 4, 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [live_bound("1f1b", 4, 2, stage) for stage in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "microbatches", "named"), [(0, 4, "stages"), (4, 0, "microbatches"), (-1, 1, "stag")]
)
def test_counts_below_one_are_refused(schedule: str, stages: int, microbatches: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.* at least 1, not"):
        schedule_lanes(schedule, stages, microbatches)


def test_counts_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"microbatches must be a whole number of at least 1, not 2\.5"):
        naive(2, 2.5)  # type: ignore[arg-type]


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zigzag': choose one of naive, afab, 1f1b"):
        schedule_lanes("zigzag", 2, 2)
