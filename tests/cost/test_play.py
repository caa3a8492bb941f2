"""Playing tasks that share nothing: messages and reductions."""

from __future__ import annotations

import pytest

from playing import BACKWARD, FORWARD, backward, ends, forward, receive, reduce, send, step, times
from polylane.cost.play import play
from polylane.cost.steps import scheduled
from polylane.cost.task import Task, Transfer
from polylane.observe.timeline import Span
from polylane.schedule.action import Action, Kind
from polylane.schedule.synchronous import schedule_lanes


def test_tasks_follow_each_other() -> None:
    timeline = play([[forward(1), backward(2), step(0.5)]])
    assert times(timeline, 0) == [("forward", 0, 1), ("backward", 1, 3), ("step", 3, 3.5)]
    assert (timeline.ranks, timeline.unit) == (1, "seconds")


def test_no_lane_and_an_empty_one() -> None:
    assert play([]).spans == ()
    assert play([[], []]).ranks == 2


def test_a_send_keeps_nobody_and_a_receive_waits() -> None:
    timeline = play([[forward(1), send("a", Transfer(3)), forward(1, 1)], [receive("a"), forward(1)]])
    assert times(timeline, 0) == [("forward", 0, 1), ("send", 1, 1), ("forward", 1, 2)]
    assert times(timeline, 1) == [("receive", 1, 4), ("forward", 4, 5)]


def test_a_message_that_is_there_is_not_waited_for() -> None:
    timeline = play([[forward(1), send("a", Transfer(1))], [forward(5), receive("a"), forward(1, 1)]])
    assert times(timeline, 1) == [("forward", 0, 5), ("receive", 5, 5), ("forward", 5, 6)]


def test_what_is_waited_for_before_it_is_sent_is_a_bubble() -> None:
    timeline = play([[forward(4), send("a", Transfer(1))], [receive("a"), forward(1)]])
    assert timeline.exposed_communication() == (0, 1)
    assert timeline.idle() == (2, 4)


def test_packing_and_unpacking_keep_the_lane() -> None:
    lanes = [
        [send("a", Transfer(1), seconds=0.5), forward(1)],
        [receive("a", seconds=0.25), forward(1)],
    ]
    timeline = play(lanes)
    assert times(timeline, 0) == [("send", 0, 0.5), ("forward", 0.5, 1.5)]
    assert times(timeline, 1) == [("receive", 0.5, 1.75), ("forward", 1.75, 2.75)]


def test_messages_of_a_pair_queue_and_those_to_others_do_not() -> None:
    lanes = [
        [send("a", Transfer(2), 1), send("b", Transfer(2), 1), send("c", Transfer(2), 2)],
        [receive("a"), receive("b")],
        [receive("c")],
    ]
    assert ends(play(lanes)) == [0, 4, 2]


def test_latency_takes_no_turn() -> None:
    lanes = [[send(str(i), Transfer(1, latency=10)) for i in range(3)], [receive(str(i)) for i in range(3)]]
    assert [end for _, _, end in times(play(lanes), 1)] == [11, 12, 13]


def test_messages_may_be_received_in_another_order() -> None:
    lanes = [[send("a", Transfer(1)), send("b", Transfer(1))], [receive("b"), receive("a")]]
    assert times(play(lanes), 1) == [("receive", 0, 2), ("receive", 2, 2)]


def test_the_same_key_again_is_the_next_message() -> None:
    lanes = [[send("a", Transfer(1)), forward(5), send("a", Transfer(1))], [receive("a"), receive("a")]]
    assert [end for _, _, end in times(play(lanes), 1)] == [1, 6]


def test_ends_values_and_microbatches_are_the_key_where_lanes_are_ranks() -> None:
    def message(kind: Kind, peer: int, value: str, transfer: Transfer = Transfer()) -> Task:  # noqa: B008
        return Task(Action(kind, 0, 0, value, peer), transfer=transfer)

    lanes = [
        [
            message(Kind.SEND, 1, "a", Transfer(1)),
            message(Kind.SEND, 1, "b", Transfer(1)),
            message(Kind.RECEIVE, 1, "a"),
        ],
        [message(Kind.RECEIVE, 0, "b"), message(Kind.RECEIVE, 0, "a"), message(Kind.SEND, 0, "a", Transfer(4))],
    ]
    assert ends(play(lanes)) == [6, 2]


def test_a_message_moves_only_once_its_receive_is_posted_where_that_is_said() -> None:
    sent = [send("a", Transfer(2))]
    assert ends(play([sent, [forward(5), receive("a")]]))[1] == 5
    assert ends(play([sent, [forward(5), receive("a", after=FORWARD)]]))[1] == 7
    assert ends(play([sent, [forward(5), receive("a", after=FORWARD, fraction=0)]]))[1] == 5


def test_spans_carry_bytes_and_waits() -> None:
    (span,) = play([[Task(FORWARD, 2, waited=0.5, bytes=12)]]).spans
    assert span == Span(0, FORWARD, 0, 2, 0.5, 12)


@pytest.mark.parametrize(("schedule", "makespan"), [("afab", 39), ("1f1b", 49)])
def test_a_hop_costs_1f1b_more(schedule: str, makespan: int) -> None:
    lanes = schedule_lanes(schedule, 4, 8)
    assert play(scheduled(lanes, 1, 2, Transfer(latency=1))).makespan() == makespan
    assert play(scheduled(lanes, 1, 2, Transfer(1))).makespan() == makespan
    assert type(play(scheduled(lanes, 1, 2, Transfer(1))).makespan()) is int


# Reductions


def test_a_reduction_starts_when_the_last_lane_is_ready() -> None:
    lanes = [[forward(s), reduce("w", 2, (0, 1)), forward(1, 1)] for s in (1, 3)]
    timeline = play(lanes)
    assert times(timeline, 0) == [("forward", 0, 1), ("reduce", 3, 5), ("forward", 5, 6)]
    assert times(timeline, 1) == [("forward", 0, 3), ("reduce", 3, 5), ("forward", 5, 6)]


def test_an_overlapped_reduction_runs_beside_and_the_step_waits_for_it() -> None:
    timeline = play([[backward(1), reduce("w", 5, (0,), overlapped=True), forward(2, 1), step(1)]])
    assert times(timeline, 0) == [("backward", 0, 1), ("reduce", 1, 6), ("forward", 1, 3), ("step", 6, 7)]
    assert (timeline.busy(), timeline.exposed_communication()) == ((4,), (3,))


def test_buckets_leave_in_the_course_of_the_last_backward_pass() -> None:
    buckets = [
        reduce(str(i), 1, (0, 1), after=BACKWARD, fraction=f, overlapped=True) for i, f in enumerate((0.25, 0.5, 1))
    ]
    timeline = play([[backward(4), *buckets, step()], [backward(8), *buckets, step()]])
    for rank in (0, 1):
        assert [(s, e) for kind, s, e in times(timeline, rank) if kind == "reduce"] == [(2, 3), (4, 5), (8, 9)]
        assert times(timeline, rank)[-1] == ("step", 9, 9)


def test_reductions_of_a_lane_run_one_after_another_but_for_other_channels() -> None:
    first = reduce("a", 5, (0,), overlapped=True)
    second = reduce("b", 5, (0,), overlapped=True)
    other = reduce("b", 5, (0,), overlapped=True, channel="tensor")
    assert play([[first, second, step()]]).makespan() == 10
    assert play([[first, other, step()]]).makespan() == 5


def test_a_reduction_waits_for_its_channel_in_every_lane() -> None:
    lanes = [
        [reduce("a", 4, (0, 1), overlapped=True), step()],
        [reduce("a", 4, (0, 1), overlapped=True), reduce("b", 1, (1, 2), overlapped=True), step()],
        [reduce("b", 1, (1, 2), overlapped=True), step()],
    ]
    assert ends(play(lanes)) == [4, 5, 5]


def test_a_later_step_does_not_wait_for_what_an_earlier_one_waited_for() -> None:
    lane = [reduce("a", 3, (0,), overlapped=True), step(1), reduce("a", 3, (0,), overlapped=True), forward(1), step(1)]
    assert [t for t in times(play([lane]), 0) if t[0] == "step"] == [("step", 3, 4), ("step", 7, 8)]


def test_a_receive_may_wait_for_a_reduction_of_its_lane() -> None:
    """Parameters that are gathered while the pass before runs."""
    gather = Task(Action(Kind.REDUCE, 0, value="g"), key="g", transfer=Transfer(3), overlapped=True, lanes=(0, 1))
    timeline = play([[gather, forward(s), receive("g"), forward(1, 1)] for s in (1, 2)])
    assert times(timeline, 0) == [("reduce", 0, 3), ("forward", 0, 1), ("receive", 1, 3), ("forward", 3, 4)]
    assert times(timeline, 1)[2] == ("receive", 2, 3)
