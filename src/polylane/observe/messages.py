"""Messages of a timeline: which receive belongs to which send, and an upper bound on each transfer's time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from polylane.observe.timeline import Span
from polylane.schedule.action import ActionKind


def match_messages(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Return every (send, receive) of the same value; its nth send belongs to its nth receive."""
    sent: dict[tuple[Any, ...], deque[Span]] = defaultdict(deque)
    received: list[Span] = []
    travelling = (span for span in spans if span.action.kind in (ActionKind.SEND, ActionKind.RECEIVE))
    for span in sorted(travelling, key=lambda span: span.start):
        action = span.action
        if action.kind is ActionKind.SEND:
            # Between two ranks messages arrive in the order in which they were sent, so that counting is enough.
            sent[(span.rank, action.peer, action.value, action.microbatch, action.gradient)].append(span)
        else:
            received.append(span)
    pairs = []
    for receive in received:
        action = receive.action
        sends = sent[(action.peer, receive.rank, action.value, action.microbatch, action.gradient)]
        if sends:
            pairs.append((sends.popleft(), receive))
    return pairs


def transfer_times(spans: Iterable[Span]) -> dict[Span, float]:
    """Return, for every send, receive and reduce whose bytes are known, how long they took to travel at most.

    A message travels from the start of its send to the end of its receive: one that arrives while its receiver still
    computes was faster than that. A reduce lasts from its own start to its end. There is no entry where one end of a
    message is missing, or where the clocks of two hosts differ so much that the time is not positive.
    """
    sized = [span for span in spans if span.bytes]
    found = {span: span.end - span.start for span in sized if span.action.kind is ActionKind.REDUCE}
    for send, receive in match_messages(sized):
        found[send] = found[receive] = receive.end - send.start
    return {span: time for span, time in found.items() if time > 0}
