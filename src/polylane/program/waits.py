"""When a worker posts its receives, and when it waits for its sends: what the executor does and the check assumes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from polylane.program.program import Posting, Program
from polylane.schedule.action import PASSES, Action, ActionKind

# Number of compute actions by which receives are posted ahead: gloo moves a message only once its receive is posted.
LOOKAHEAD = 2
# A backward pass waits for the sends of its stage of so many microbatches ago, and releases their buffers.
SEND_DEPTH = 2


def receive_horizons(actions: Sequence[Action]) -> list[int]:
    """Return, for every action, the position up to which receives are posted before it runs."""
    compute = [i for i, a in enumerate(actions) if a.kind in PASSES]
    ahead = [bisect_left(compute, index) + LOOKAHEAD for index in range(len(actions))]
    return [compute[i] if i < len(compute) else len(actions) for i in ahead]


def list_postings(program: Program, is_ordered: bool) -> Sequence[Sequence[Posting]]:
    """Return the receives that are posted before each action of a program, and behind the last one.

    Args:
        program: the worker's program; where ``is_ordered``, with its meetings.
        is_ordered: whether a posted receive may hold up all that the worker starts later.
    """
    if is_ordered:
        assert program.meetings, "programs that are run have their meetings"
        return program.meetings
    postings: list[list[Posting]] = [[] for _ in (*program.actions, None)]
    for action, position in zip(program.actions, posting_places(program.actions), strict=True):
        if action.kind is ActionKind.RECEIVE:
            postings[position].append(Posting(action))
    return postings


def posting_places(actions: Sequence[Action]) -> list[int]:
    """Return, for every position in a program, the action before which a receive at that position is posted."""
    places, at = list[int](), 0
    for position, horizon in enumerate(receive_horizons(actions)):
        if horizon > at:
            places += [position] * (horizon - at)
            at = horizon
    return places


def waiting_microbatch(program: Program, send: Action) -> int:
    """Return the first microbatch whose backward pass, on the stage of a send, waits until the message was taken.

    Where the stage has no backward pass of that microbatch or a later one, the end of the step waits.
    """
    assert send.microbatch is not None
    return program.late_sends.get(send, send.microbatch + SEND_DEPTH)


def waiting_microbatches(program: Program) -> dict[Action, int]:
    """Return :func:`waiting_microbatch` of every send of a program."""
    return {send: waiting_microbatch(program, send) for send in program.actions if send.kind is ActionKind.SEND}
