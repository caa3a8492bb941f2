"""Tasks of a schedule: passes, and the messages between lanes."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.schedule_tasks import scheduled
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import schedule_lanes


def words(lane: tuple[Task, ...]) -> list[str]:
    return [
        f"{t.action.kind} {t.action.value} {t.action.peer}{' back' * t.action.gradient}"
        if t.action.value
        else str(t.action.kind)
        for t in lane
    ]


def test_a_pass_stands_between_its_receives_and_its_sends() -> None:
    lanes = scheduled(schedule_lanes("1f1b", 3, 1), [1, 2, 3], 4, TransferTime(10))
    assert words(lanes[1]) == [
        "receive stage0 0",
        "forward",
        "send stage1 2",
        "receive stage1 2 back",
        "backward",
        "send stage0 0 back",
    ]
    assert [task.seconds for task in lanes[1]] == [0, 2, 0, 0, 4, 0]
    assert [task.transfer.seconds for task in lanes[1] if task.action.kind is ActionKind.SEND] == [10, 10]


def test_nothing_moves_between_virtual_stages_of_one_lane() -> None:
    lane = [
        Action(kind, stage, 0)
        for kind, stage in [(ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 1)]
    ]
    (tasks,) = scheduled([lane], 1, 2, TransferTime(5), StageGraph.chain(2))
    assert [task.action for task in tasks] == lane


def test_branches_send_to_all_who_read() -> None:
    lanes = scheduled(
        schedule_lanes("afab", StageGraph(((), (0,), (0, 1))), 1), 1, 1, graph=StageGraph(((), (0,), (0, 1)))
    )
    assert words(lanes[0])[:3] == ["forward", "send stage0 1", "send stage0 2"]
    assert words(lanes[2])[:3] == ["receive stage0 0", "receive stage1 1", "forward"]


def test_no_lanes() -> None:
    assert scheduled([], 1, 1) == ()


def test_steps_follow_each_other_without_a_barrier() -> None:
    lanes = scheduled(schedule_lanes("afab", 2, 2), 1, 1)
    lanes = tuple((*lane, Task(Action(ActionKind.STEP, rank))) for rank, lane in enumerate(lanes))
    one, two = simulate_tasks(lanes), simulate_tasks([2 * lane for lane in lanes])
    assert (one.makespan(), two.makespan()) == (6, 12)
    last = [span.start for span in two.spans if span.rank == 1 and span.action.kind is ActionKind.STEP]
    assert last == [5, 11]
    assert two.peak_live_microbatches() == one.peak_live_microbatches() == (2, 2)


def test_durations_must_fit_the_stages() -> None:
    with pytest.raises(ValueError, match="forward names 3 durations for 2 stages"):
        scheduled(schedule_lanes("afab", 2, 1), [1, 2, 3], 1)
