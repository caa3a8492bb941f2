"""Which receive belongs to which send, and how long what travels was under way at most."""

from __future__ import annotations

import pytest

from polylane.observe.timeline import Span, match_messages, transfer_times
from polylane.schedule.action import Action, ActionKind


def send(rank: int, peer: int, start: float, value: str = "v", size: int = 8, gradient: bool = False) -> Span:
    return Span(rank, Action(ActionKind.SEND, rank, 0, value, peer, gradient), start, start + 1, bytes=size)


def receive(rank: int, peer: int, start: float, end: float, size: int = 8, gradient: bool = False) -> Span:
    return Span(rank, Action(ActionKind.RECEIVE, rank, 0, "v", peer, gradient), start, end, bytes=size)


def test_the_nth_send_belongs_to_the_nth_receive() -> None:
    first, second, other = send(0, 1, 0), send(0, 1, 10), send(2, 1, 5)
    later, early, of_other = receive(1, 0, 12, 15), receive(1, 0, 2, 3), receive(1, 2, 0, 9)
    assert match_messages([second, later, other, early, first, of_other]) == [
        (other, of_other),
        (first, early),
        (second, later),
    ]


def test_a_gradient_is_another_message_than_its_value() -> None:
    assert match_messages([send(0, 1, 0), receive(1, 0, 0, 2, gradient=True)]) == []


def test_from_the_start_of_the_send_to_the_end_of_the_receive() -> None:
    """That the receiver began to wait long before, or turned to it long after, changes nothing at the start."""
    sent = send(0, 1, 4)
    for received in (receive(1, 0, 0, 10), receive(1, 0, 9, 10)):
        assert transfer_times([sent, received]) == {sent: 6, received: 6}


def test_a_reduce_is_under_way_from_start_to_end() -> None:
    reduce = Span(0, Action(ActionKind.REDUCE, 0, None, "bucket"), 2, 5, bytes=8)
    assert transfer_times([reduce]) == {reduce: 3}


@pytest.mark.parametrize(
    "spans",
    [
        [send(0, 1, 0)],
        [receive(1, 0, 0, 1)],
        [send(0, 1, 4), receive(1, 0, 0, 3)],  # by clocks that disagree
        [send(0, 1, 0, size=0), receive(1, 0, 0, 3, size=0)],
        [Span(0, Action(ActionKind.FORWARD, 0, 0), 0, 1, bytes=8)],
    ],
)
def test_what_cannot_be_told_is_left_out(spans: list[Span]) -> None:
    assert transfer_times(spans) == {}
