"""Laws of time accounts: the four parts make up every rank's time, and each is what its definition says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule
from polylane.observe.stretches import TimeState
from polylane.observe.time_account import TimeAccount, account_time
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import NAMES
from tests.support import subsets

F, B, SEND, RECEIVE, REDUCE = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.SEND,
    ActionKind.RECEIVE,
    ActionKind.REDUCE,
)


def forward(rank: int, start: float, end: float, microbatch: int = 0, waited: float = 0, stage: int = -1) -> Span:
    return Span(rank, Action(F, rank if stage < 0 else stage, microbatch), start, end, waited)


def message(sender: int, receiver: int, sent: float, wait: float, arrival: float, value: str = "h") -> list[Span]:
    """A message that is sent at a moment, and received between two."""
    send = Span(sender, Action(SEND, sender, 0, value, receiver), sent, sent)
    return [send, Span(receiver, Action(RECEIVE, receiver, 0, value, sender), wait, arrival)]


def reduce(rank: int, start: float, end: float, name: str = "w", stage: int = 0) -> Span:
    return Span(rank, Action(REDUCE, stage, value=name), start, end)


def check_sums(account: TimeAccount) -> None:
    for rank, stretches in zip(account.ranks, account.stretches, strict=True):
        parts = (rank.computing, rank.moving, rank.waited, rank.bubble)
        assert sum(parts) == pytest.approx(account.makespan, abs=1e-9) and min(parts) >= 0
        assert all(one.end <= other.start for one, other in pairwise(stretches))
    if account.makespan:
        assert sum(account.shares().values()) == pytest.approx(1, abs=1e-9)
        assert sum(account.waiting_for().values()) == pytest.approx(account.shares()["waiting"], abs=1e-9)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any spans, also such that no run could have: clocks that disagree, messages without an end, passes at once."""
    ranks, spans = draw(st.integers(1, 4)), list[Span]()
    moments = st.integers(0, 40).map(lambda tenths: tenths / 10)
    for _ in range(draw(st.integers(0, 30))):
        rank, kind = draw(st.integers(0, ranks - 1)), draw(st.sampled_from([*ActionKind]))
        start, end = sorted((draw(moments), draw(moments)))
        peer = draw(st.integers(0, ranks - 1)) if kind in (SEND, RECEIVE) else None
        value = draw(st.sampled_from(["a", "b"])) if kind in (SEND, RECEIVE, REDUCE) else None
        action = Action(kind, draw(st.integers(0, 2)), draw(st.integers(0, 1)), value, peer)
        waited = draw(st.floats(0, end - start)) if kind in (F, B) else 0
        spans.append(Span(rank, action, start, end, waited))
    return Timeline(tuple(spans), ranks)


@given(timelines())
@settings(deadline=None, max_examples=subsets.examples(300))
def test_the_four_parts_make_up_the_time_of_every_rank(timeline: Timeline) -> None:
    account = account_time(timeline)
    check_sums(account)
    for rank, spent in enumerate(account.ranks):
        assert spent.computing == pytest.approx(timeline.busy()[rank], abs=1e-9)
        assert rank not in spent.waiting


@pytest.mark.parametrize("schedule", NAMES)
def test_theory_has_bubbles_alone(schedule: str) -> None:
    account = account_time(draw_schedule(ScheduleShape(schedule=schedule, stages=4, microbatches=8), 1, 2).timeline)
    check_sums(account)
    assert account.shares()["moving"] == account.shares()["waiting"] == 0


def test_the_bubble_of_1f1b_is_exact() -> None:
    account = account_time(draw_schedule(ScheduleShape(schedule="1f1b", stages=4, microbatches=8), 1, 2).timeline)
    assert [(rank.computing, rank.bubble) for rank in account.ranks] == [(24, 9)] * 4


def test_a_receive_moves_bytes_from_when_they_are_sent() -> None:
    """Until then it leaves a bubble, for as long as a forward pass takes on a typical stage."""
    spans = [forward(0, 0, 2), *message(0, 1, 2, 0, 3), forward(1, 3, 5)]
    first, second = account_time(Timeline(tuple(spans), 2)).ranks
    assert (first.computing, first.bubble) == (2, 3)
    assert (second.computing, second.moving, second.waiting, second.bubble) == (2, 1, {}, 2)


def test_a_slower_stage_is_waited_for() -> None:
    spans = [forward(0, 0, 5), *message(0, 1, 5, 0, 6), forward(1, 6, 8)]
    (_, second) = account_time(Timeline(tuple(spans), 2)).ranks
    assert (second.moving, second.waiting, second.bubble) == (1, {0: 3}, 2)


def test_a_wait_is_for_the_rank_at_the_end_of_the_chain() -> None:
    spans = [forward(0, 0, 5), *message(0, 1, 5, 0, 5), forward(1, 5, 6), *message(1, 2, 6, 0, 6), forward(2, 6, 7)]
    last = account_time(Timeline(tuple(spans), 3)).ranks[2]
    assert (last.waiting, last.bubble) == ({0: 4}, 2)


def test_a_rank_that_does_nothing_is_waited_for() -> None:
    """Such as one that still loads its batch."""
    spans = [forward(0, 2, 3), *message(0, 1, 3, 0, 3), forward(1, 3, 4)]
    (_, second) = account_time(Timeline(tuple(spans), 2)).ranks
    assert (second.waiting, second.bubble) == ({0: 2}, 1)


def test_a_simulated_receive_is_waited_for_in_the_free_time_before_it() -> None:
    late = [forward(0, 0, 5), *message(0, 1, 5, 5, 6), forward(1, 6, 8)]
    early = [forward(0, 0, 5), *message(0, 1, 5, 0, 6), forward(1, 6, 8)]
    assert account_time(Timeline(tuple(late), 2)).ranks == account_time(Timeline(tuple(early), 2)).ranks


def test_a_message_that_is_there_is_not_waited_for() -> None:
    spans = [forward(0, 0, 1), *message(0, 1, 1, 5, 5.5), forward(1, 0, 5), forward(1, 5.5, 6, 1)]
    (_, second) = account_time(Timeline(tuple(spans), 2)).ranks
    assert (second.moving, second.waiting) == (0.5, {})


def test_a_reduce_waits_until_the_last_has_begun() -> None:
    spans = [forward(0, 0, 2, stage=0), reduce(0, 2, 6), forward(1, 0, 5, stage=0), reduce(1, 5, 6)]
    first, second = account_time(Timeline(tuple(spans), 2)).ranks
    assert (first.computing, first.moving, first.waiting, first.bubble) == (2, 1, {1: 3}, 0)
    assert (second.computing, second.moving, second.waiting, second.bubble) == (5, 1, {}, 0)


def test_free_time_before_a_reduce_of_its_own_is_a_bubble() -> None:
    (spent,) = account_time(Timeline((forward(0, 0, 2), reduce(0, 3, 4)), 1)).ranks
    assert (spent.computing, spent.moving, spent.waiting, spent.bubble) == (2, 1, {}, 1)


def test_a_reduce_under_a_backward_pass_hides() -> None:
    spans = [Span(0, Action(B, 0, 0), 0, 4), reduce(0, 1, 6), Span(1, Action(B, 0, 0), 0, 5), reduce(1, 3, 6)]
    first, second = account_time(Timeline(tuple(spans), 2)).ranks
    assert (first.computing, first.moving, first.waiting) == (4, 2, {})
    assert (second.computing, second.moving) == (5, 1)


def test_groups_of_one_name_do_not_wait_for_each_other() -> None:
    starts = (2, 2, 5, 5)
    spans = [s for r, t in enumerate(starts) for s in (forward(r, 0, t, stage=0), reduce(r, t, t + 1))]
    mixed = account_time(Timeline(tuple(spans), 4))
    assert mixed.ranks[0].waiting == {2: 1}
    groups = {"w": ((0, 1), (2, 3))}
    apart = account_time(Timeline(tuple(spans), 4, groups=groups))
    assert [rank.waiting for rank in apart.ranks] == [{}] * 4
    assert Timeline.from_dict(Timeline(tuple(spans), 4, groups=groups).to_dict()).groups == groups


def test_collectives_inside_a_pass_wait_for_the_rank_that_waits_least() -> None:
    spans = [forward(0, 0, 10, waited=5, stage=0), forward(1, 0, 10, waited=2, stage=0)]
    account = account_time(Timeline(tuple(spans), 2))
    first, second = account.ranks
    assert (first.computing, first.moving, first.waiting) == (5, 2, {1: 3})
    assert (second.computing, second.moving, second.waiting) == (8, 2, {})
    assert account.inner[spans[0]].waiting == 3


def test_stretches_say_which_span_covers_them() -> None:
    spans = [forward(0, 0, 5), *message(0, 1, 5, 0, 6), forward(1, 6, 8)]
    stretches = account_time(Timeline(tuple(spans), 2)).stretches[1]
    assert [(s.start, s.end, s.state) for s in stretches] == [
        (0, 2, TimeState.BUBBLE),
        (2, 5, TimeState.WAITING),
        (5, 6, TimeState.MOVING),
    ]
    assert {s.span for s in stretches} == {spans[2]}
