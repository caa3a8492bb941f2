"""Workers that wait for their sends wait in no circle, or it is told before the run."""

from __future__ import annotations

from typing import Any

import pytest

from polylane.program.check import check
from polylane.program.program import Program
from polylane.program.waits import LOOKAHEAD, SEND_DEPTH, receive_horizons
from polylane.schedule.action import Action, ActionKind

FORWARD, BACKWARD, SEND, RECEIVE = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.SEND, ActionKind.RECEIVE


def program(rank: int, *actions: Action) -> Program:
    nothing: Any = None
    return Program(
        rank=rank,
        stage=rank,
        replica=0,
        replicas=(rank,),
        actions=actions,
        stages=(rank,),
        local_sources={},
        buckets=(),
        partition=nothing,
        coordinates={},
        microbatches=3,
        takes_turns=False,
    )


def two_workers(passes_before: int) -> list[Program]:
    """Worker 0 sends x early and y behind all of its passes; worker 1 needs y first, and x so many passes later."""
    sends = [Action(SEND, 0, 0, value="x", peer=1)]
    passes = [Action(kind, 0, i) for kind in (FORWARD, BACKWARD) for i in range(SEND_DEPTH + 1)]
    first = program(0, passes[0], *sends, *passes[1:], Action(SEND, 0, SEND_DEPTH, value="y", peer=1))
    needed = Action(RECEIVE, 1, SEND_DEPTH, value="y", peer=0), Action(RECEIVE, 1, 0, value="x", peer=0)
    between = [Action(FORWARD, 1, i) for i in range(passes_before)]
    return [first, program(1, needed[0], *between, needed[1])]


def test_messages_of_two_workers_are_in_order() -> None:
    with pytest.raises(RuntimeError, match="would meet"):
        check(two_workers(1))


def test_a_circle_of_sends_and_receives_is_seen() -> None:
    """A receive that is posted ahead takes its message in time; one that is needed later keeps the sender waiting."""
    on_time, late = (_three_workers(n) for n in (LOOKAHEAD - 1, LOOKAHEAD + 1))
    check(on_time)
    with pytest.raises(RuntimeError, match="wait for each other"):
        check(late)


def _three_workers(passes_before: int) -> list[Program]:
    """As two workers, with y by way of a third one, so that no messages of two workers overtake each other."""
    first, second = two_workers(passes_before)
    *others, y = first.actions
    relay = program(
        2, Action(RECEIVE, 2, SEND_DEPTH, value="y", peer=0), Action(SEND, 2, SEND_DEPTH, value="y", peer=1)
    )
    wanted, *rest = second.actions
    return [
        program(0, *others, Action(SEND, 0, y.microbatch, value="y", peer=2)),
        program(1, Action(RECEIVE, 1, wanted.microbatch, value="y", peer=2), *rest),
        relay,
    ]


def test_receives_are_posted_some_passes_ahead() -> None:
    actions = two_workers(4)[1].actions
    passes = [i for i, action in enumerate(actions) if action.kind is FORWARD]
    horizons = receive_horizons(actions)
    assert horizons[passes[0]] == passes[LOOKAHEAD] and horizons[passes[-1]] == len(actions)
