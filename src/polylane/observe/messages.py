"""Messages: which receive belongs to which send, and how long what travels was under way at most."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from polylane.observe.timeline import Span
from polylane.schedule.action import ActionKind


def match_messages(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Every (send, receive) of the same value; the nth send of it belongs to the nth receive."""
    sent: dict[tuple[Any, ...], deque[Span]] = defaultdict(deque)
    received: list[Span] = []
    travelling = (span for span in spans if span.action.kind in (ActionKind.SEND, ActionKind.RECEIVE))
    for span in sorted(travelling, key=lambda span: span.start):
        action = span.action
        if action.kind is ActionKind.SEND:
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
    """For every send, receive and reduce of which the bytes are known: how long these were under way at most.

    From the start of a send to the end of the receive: what arrives while its receiver still computes was faster than
    that. A reduce is under way from its own start to its end. Where the clocks of two hosts are too far apart to tell,
    or one end of a message is missing, there is no entry.
    """
    sized = [span for span in spans if span.bytes]
    found = {span: span.end - span.start for span in sized if span.action.kind is ActionKind.REDUCE}
    for send, receive in match_messages(sized):
        found[send] = found[receive] = receive.end - send.start
    return {span: time for span, time in found.items() if time > 0}
