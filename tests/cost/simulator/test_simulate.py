"""Playing tasks that share nothing: messages and reductions."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Span
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import schedule_lanes
from tests.support.simulated_tasks import (
    BACKWARD,
    FORWARD,
    backward,
    ends,
    forward,
    receive,
    reduce,
    scheduled,
    send,
    step,
    times,
)


def test_tasks_follow_each_other() -> None:
    timeline = simulate_tasks([[forward(1), backward(2), step(0.5)]])
    assert times(timeline, 0) == [("forward", 0, 1), ("backward", 1, 3), ("step", 3, 3.5)]
    assert (timeline.ranks, timeline.unit) == (1, "seconds")


def test_no_lane_and_an_empty_one() -> None:
    assert simulate_tasks([]).spans == ()
    assert simulate_tasks([[], []]).ranks == 2


def test_a_send_keeps_nobody_and_a_receive_waits() -> None:
    timeline = simulate_tasks([[forward(1), send("a", TransferTime(3)), forward(1, 1)], [receive("a"), forward(1)]])
    assert times(timeline, 0) == [("forward", 0, 1), ("send", 1, 1), ("forward", 1, 2)]
    assert times(timeline, 1) == [("receive", 1, 4), ("forward", 4, 5)]


def test_a_message_that_is_there_is_not_waited_for() -> None:
    timeline = simulate_tasks([[forward(1), send("a", TransferTime(1))], [forward(5), receive("a"), forward(1, 1)]])
    assert times(timeline, 1) == [("forward", 0, 5), ("receive", 5, 5), ("forward", 5, 6)]


def test_what_is_waited_for_before_it_is_sent_is_no_communication() -> None:
    timeline = simulate_tasks([[forward(4), send("a", TransferTime(1))], [receive("a"), forward(1)]])
    first, second = account_time(timeline).ranks
    assert (first.computing, first.moving, first.waiting, first.bubble) == (4, 0, {}, 2)
    # A forward takes 1 as a rule, so that what lane 0 takes beyond that is waited for.
    assert (second.computing, second.moving, second.waiting, second.bubble) == (1, 1, {0: 3}, 1)


def test_packing_and_unpacking_keep_the_lane() -> None:
    lanes = [
        [send("a", TransferTime(1), seconds=0.5), forward(1)],
        [receive("a", seconds=0.25), forward(1)],
    ]
    timeline = simulate_tasks(lanes)
    assert times(timeline, 0) == [("send", 0, 0.5), ("forward", 0.5, 1.5)]
    assert times(timeline, 1) == [("receive", 0.5, 1.75), ("forward", 1.75, 2.75)]


def test_messages_of_a_pair_queue_and_those_to_others_do_not() -> None:
    lanes = [
        [send("a", TransferTime(2), 1), send("b", TransferTime(2), 1), send("c", TransferTime(2), 2)],
        [receive("a"), receive("b")],
        [receive("c")],
    ]
    assert ends(simulate_tasks(lanes)) == [0, 4, 2]


def test_latency_takes_no_turn() -> None:
    lanes = [[send(str(i), TransferTime(1, latency=10)) for i in range(3)], [receive(str(i)) for i in range(3)]]
    assert [end for _, _, end in times(simulate_tasks(lanes), 1)] == [11, 12, 13]


def test_messages_may_be_received_in_another_order() -> None:
    lanes = [[send("a", TransferTime(1)), send("b", TransferTime(1))], [receive("b"), receive("a")]]
    assert times(simulate_tasks(lanes), 1) == [("receive", 0, 2), ("receive", 2, 2)]


def test_the_same_key_again_is_the_next_message() -> None:
    lanes = [[send("a", TransferTime(1)), forward(5), send("a", TransferTime(1))], [receive("a"), receive("a")]]
    assert [end for _, _, end in times(simulate_tasks(lanes), 1)] == [1, 6]


def test_ends_values_and_microbatches_are_the_key_where_lanes_are_ranks() -> None:
    def message(kind: ActionKind, peer: int, value: str, transfer: TransferTime = TransferTime()) -> Task:  # noqa: B008
        return Task(Action(kind, 0, 0, value, peer), transfer=transfer)

    lanes = [
        [
            message(ActionKind.SEND, 1, "a", TransferTime(1)),
            message(ActionKind.SEND, 1, "b", TransferTime(1)),
            message(ActionKind.RECEIVE, 1, "a"),
        ],
        [
            message(ActionKind.RECEIVE, 0, "b"),
            message(ActionKind.RECEIVE, 0, "a"),
            message(ActionKind.SEND, 0, "a", TransferTime(4)),
        ],
    ]
    assert ends(simulate_tasks(lanes)) == [6, 2]


def test_a_message_moves_only_once_its_receive_is_posted_where_that_is_said() -> None:
    sent = [send("a", TransferTime(2))]
    assert ends(simulate_tasks([sent, [forward(5), receive("a")]]))[1] == 5
    assert ends(simulate_tasks([sent, [forward(5), receive("a", after=FORWARD)]]))[1] == 7
    assert ends(simulate_tasks([sent, [forward(5), receive("a", after=FORWARD, fraction=0)]]))[1] == 5


def test_spans_carry_bytes_and_waits() -> None:
    (span,) = simulate_tasks([[Task(FORWARD, 2, waited=0.5, bytes=12)]]).spans
    assert span == Span(0, FORWARD, 0, 2, 0.5, 12)


@pytest.mark.parametrize(("schedule", "makespan"), [("afab", 39), ("1f1b", 49)])
def test_a_hop_costs_1f1b_more(schedule: str, makespan: int) -> None:
    lanes = schedule_lanes(schedule, 4, 8)
    ticks: dict[ActionKind, float] = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}
    for transfer in (TransferTime(latency=1), TransferTime(1)):
        timeline = simulate_tasks(scheduled(lanes, ticks, transfer))
        assert timeline.makespan() == makespan
        assert type(timeline.makespan()) is int


def test_steps_follow_each_other_without_a_barrier() -> None:
    ticks: dict[ActionKind, float] = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 1}
    passes = scheduled(schedule_lanes("afab", 2, 2), ticks, TransferTime())
    lanes = [[*lane, Task(Action(ActionKind.STEP, rank))] for rank, lane in enumerate(passes)]
    one, two = simulate_tasks(lanes), simulate_tasks([2 * lane for lane in lanes])
    assert (one.makespan(), two.makespan()) == (6, 12)
    last = [span.start for span in two.spans if span.rank == 1 and span.action.kind is ActionKind.STEP]
    assert last == [5, 11]
    assert two.peak_live_microbatches() == one.peak_live_microbatches() == (2, 2)


# Reductions


def test_a_reduction_starts_when_the_last_lane_is_ready() -> None:
    lanes = [[forward(s), reduce("w", 2, (0, 1)), forward(1, 1)] for s in (1, 3)]
    timeline = simulate_tasks(lanes)
    assert times(timeline, 0) == [("forward", 0, 1), ("reduce", 3, 5), ("forward", 5, 6)]
    assert times(timeline, 1) == [("forward", 0, 3), ("reduce", 3, 5), ("forward", 5, 6)]


def test_an_overlapped_reduction_runs_beside_and_the_step_waits_for_it() -> None:
    timeline = simulate_tasks([[backward(1), reduce("w", 5, (0,), overlapped=True), forward(2, 1), step(1)]])
    assert times(timeline, 0) == [("backward", 0, 1), ("reduce", 1, 6), ("forward", 1, 3), ("step", 6, 7)]
    (lane,) = account_time(timeline).ranks
    assert (lane.computing, lane.moving, lane.bubble) == (4, 3, 0)


def test_buckets_leave_in_the_course_of_the_last_backward_pass() -> None:
    buckets = [
        reduce(str(i), 1, (0, 1), after=BACKWARD, fraction=f, overlapped=True) for i, f in enumerate((0.25, 0.5, 1))
    ]
    timeline = simulate_tasks([[backward(4), *buckets, step()], [backward(8), *buckets, step()]])
    for rank in (0, 1):
        assert [(s, e) for kind, s, e in times(timeline, rank) if kind == "reduce"] == [(2, 3), (4, 5), (8, 9)]
        assert times(timeline, rank)[-1] == ("step", 9, 9)


def test_reductions_of_a_lane_run_one_after_another() -> None:
    first = reduce("a", 5, (0,), overlapped=True)
    second = reduce("b", 5, (0,), overlapped=True)
    assert simulate_tasks([[first, second, step()]]).makespan() == 10


def test_a_reduction_waits_for_its_channel_in_every_lane() -> None:
    lanes = [
        [reduce("a", 4, (0, 1), overlapped=True), step()],
        [reduce("a", 4, (0, 1), overlapped=True), reduce("b", 1, (1, 2), overlapped=True), step()],
        [reduce("b", 1, (1, 2), overlapped=True), step()],
    ]
    assert ends(simulate_tasks(lanes)) == [4, 5, 5]


def test_a_later_step_does_not_wait_for_what_an_earlier_one_waited_for() -> None:
    lane = [reduce("a", 3, (0,), overlapped=True), step(1), reduce("a", 3, (0,), overlapped=True), forward(1), step(1)]
    assert [t for t in times(simulate_tasks([lane]), 0) if t[0] == "step"] == [("step", 3, 4), ("step", 7, 8)]


def test_a_receive_may_wait_for_a_reduction_of_its_lane() -> None:
    """Parameters that are gathered while the pass before runs."""
    gather = Task(
        Action(ActionKind.REDUCE, 0, value="g"), key="g", transfer=TransferTime(3), overlapped=True, lanes=(0, 1)
    )
    timeline = simulate_tasks([[gather, forward(s), receive("g"), forward(1, 1)] for s in (1, 2)])
    assert times(timeline, 0) == [("reduce", 0, 3), ("forward", 0, 1), ("receive", 1, 3), ("forward", 3, 4)]
    assert times(timeline, 1)[2] == ("receive", 2, 3)
