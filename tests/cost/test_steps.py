"""Lanes of tasks: from schedules, for several steps, at several speeds."""

from __future__ import annotations

import pytest

from polylane.cost.play import play
from polylane.cost.steps import at_speeds, repeat, scheduled
from polylane.cost.task import Task, Transfer
from polylane.schedule.action import Action, Kind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import schedule_lanes


def reduce(name: str, lanes: tuple[int, ...], seconds: float = 4, key: str | None = None) -> Task:
    return Task(Action(Kind.REDUCE, 0, value=name), lanes=lanes, key=key, transfer=Transfer(seconds))


def words(lane: tuple[Task, ...]) -> list[str]:
    return [
        f"{t.action.kind} {t.action.value} {t.action.peer}{' back' * t.action.gradient}"
        if t.action.value
        else str(t.action.kind)
        for t in lane
    ]


def test_a_pass_stands_between_its_receives_and_its_sends() -> None:
    lanes = scheduled(schedule_lanes("1f1b", 3, 1), [1, 2, 3], 4, lambda a, b: Transfer(10 * a + b))
    assert words(lanes[1]) == [
        "receive stage0 0",
        "forward",
        "send stage1 2",
        "receive stage1 2 back",
        "backward",
        "send stage0 0 back",
    ]
    assert [task.seconds for task in lanes[1]] == [0, 2, 0, 0, 4, 0]
    assert [task.transfer.seconds for task in lanes[1] if task.action.kind is Kind.SEND] == [12, 10]


def test_nothing_moves_between_virtual_stages_of_one_lane() -> None:
    lane = [Action(kind, stage, 0) for kind, stage in [(Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 1)]]
    (tasks,) = scheduled([lane], 1, 2, Transfer(5), StageGraph.chain(2))
    assert [task.action for task in tasks] == lane


def test_branches_send_to_all_who_read() -> None:
    lanes = scheduled(
        schedule_lanes("afab", StageGraph(((), (0,), (0, 1))), 1), 1, 1, graph=StageGraph(((), (0,), (0, 1)))
    )
    assert words(lanes[0])[:3] == ["forward", "send stage0 1", "send stage0 2"]
    assert words(lanes[2])[:3] == ["receive stage0 0", "receive stage1 1", "forward"]


def test_no_lanes() -> None:
    assert scheduled([], 1, 1) == ()


def test_a_straggler_holds_the_others_up() -> None:
    lanes = scheduled(schedule_lanes("1f1b", 2, 100), 1, 2)
    assert play(lanes).makespan() == 303
    slowed = play(at_speeds(lanes, [1, 0.5]))
    assert slowed.makespan() == 1 + 100 * 6 + 2
    assert slowed.busy() == (300, 600)


def test_what_is_waited_inside_a_pass_takes_as_long_on_a_slow_worker() -> None:
    task = Task(Action(Kind.FORWARD, 0, 0), 3, waited=1)
    assert at_speeds([[task]], [0.5])[0][0].seconds == 5


def test_steps_follow_each_other_without_a_barrier() -> None:
    lanes = scheduled(schedule_lanes("afab", 2, 2), 1, 1)
    lanes = tuple((*lane, Task(Action(Kind.STEP, rank))) for rank, lane in enumerate(lanes))
    one, two = play(lanes), play(repeat(lanes, 2))
    assert (one.makespan(), two.makespan()) == (6, 12)
    last = [span.start for span in two.spans if span.rank == 1 and span.action.kind is Kind.STEP]
    assert last == [5, 11]
    assert two.peak_live_microbatches() == one.peak_live_microbatches() == (2, 2)


def test_reductions_every_few_steps() -> None:
    lane = (Task(Action(Kind.BACKWARD, 0, 0), 1), reduce("w", (0, 1)), Task(Action(Kind.STEP, 0), 1))
    assert [play(repeat([lane, lane], 6, every)).makespan() for every in (1, 2, 3, 6, 7)] == [36, 24, 20, 16, 12]


def test_some_reductions_are_needed_in_every_step() -> None:
    lane = (reduce("tensor", (0,)), reduce("data", (0,)))
    repeated = repeat([lane], 4, 2, skipped=lambda task: task.action.value == "data")
    assert [task.action.value for task in repeated[0]] == ["tensor", "tensor", "data"] * 2


def test_who_waits_for_a_reduction_does_not_where_it_is_left_out() -> None:
    lane = (reduce("w", (0,), key="w"), Task(Action(Kind.RECEIVE, 0, value="w"), key="w"))
    assert [len(each) for each in repeat([lane], 3, 3)] == [2]
    assert play(repeat([lane], 3, 3)).makespan() == 4


def test_what_means_nothing_is_refused() -> None:
    lanes = scheduled(schedule_lanes("afab", 2, 1), 1, 1)
    with pytest.raises(ValueError, match="steps and reduce_every must be at least 1, not 0 and 1"):
        repeat(lanes, 0)
    with pytest.raises(ValueError, match="steps and reduce_every must be at least 1, not 1 and 0"):
        repeat(lanes, 1, 0)
    with pytest.raises(ValueError, match="3 speeds are given for 2 lanes"):
        at_speeds(lanes, [1, 1, 1])
    with pytest.raises(ValueError, match="a speed must be more than 0, not 0"):
        at_speeds(lanes, [1, 0])
    with pytest.raises(ValueError, match="forward names 3 durations for 2 stages"):
        scheduled(schedule_lanes("afab", 2, 1), [1, 2, 3], 1)
