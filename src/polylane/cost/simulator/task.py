"""Simulator tasks: the actions of a lane with their undisturbed durations and transfers."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from polylane.schedule.action import COMMUNICATION, Action, ActionKind


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Undisturbed duration and resources of a transfer; one object may serve all messages of a kind.

    Attributes:
        seconds: duration for which it occupies its channel.
        latency: further seconds until it has arrived, in which it occupies nothing.
        cpu: cores that it takes in every lane at its ends (a message: sender and receiver) while it moves; 2 for two
            cores.

    Raises:
        ValueError: a figure is negative or not finite.
    """

    seconds: float = 0
    latency: float = 0
    cpu: float = 0

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("latency", self.latency), ("cpu", self.cpu)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of a transfer must be at least 0, not {value}")


NOTHING = TransferTime()


@dataclass(frozen=True, slots=True)
class Task:
    """One action of one lane.

    Attributes:
        action: the action; kinds other than send, receive and reduce compute. A step waits for all overlapped
            reductions before it in the lane.
        seconds: undisturbed duration for which it keeps the lane: of a pass, or of packing a message.
        waited: part of ``seconds`` spent in collectives inside the action; shared cores do not slow it.
        bytes: bytes that the lane sends or receives (`polylane.observe.timeline.Span.bytes`).
        key: equal for a send and its receive, and for a reduction in all its lanes; the n-th send of a key is matched
            with the n-th receive. Default, if lanes are ranks: ends, value, microbatch and direction of a message;
            value and lanes of a reduction. A receive whose own lane reduces the key waits for that reduction.
        transfer: undisturbed transfer of a send or a reduction.
        lanes: lanes that take part in a reduction; default: its own only.
        after: an earlier computing task of the lane (the last with that action) from which on the lane is ready for the
            transfer, even though it reaches this task later. Default: a send or reduction may start when the lane
            reaches it, a receive is ready at any time.
        fraction: fraction of ``after`` that must be done, from 0 (its start) to 1 (its end): a gradient bucket is
            complete in the course of the last backward pass.
        overlapped: whether the lane goes on at once after requesting a reduction; else it waits for it.

    Raises:
        ValueError: a figure is out of range, or not applicable to this kind of action.
    """

    action: Action
    seconds: float = 0
    waited: float = 0
    bytes: int = 0
    key: Hashable = None
    transfer: TransferTime = NOTHING
    lanes: tuple[int, ...] = ()
    after: Action | None = None
    fraction: float = 1
    overlapped: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.waited <= self.seconds < math.inf:
            raise ValueError(
                f"{describe_action(self.action)} must take at least 0 seconds, and wait for no more than all of them, "
                f"not {self.seconds} and {self.waited}"
            )
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"{describe_action(self.action)}: fraction must lie between 0 and 1, not {self.fraction}")
        if self.overlapped and (self.action.kind is not ActionKind.REDUCE or self.seconds):
            raise ValueError(
                f"{describe_action(self.action)}: only a reduction that does not keep its lane can be overlapped"
            )
        if self.after is not None and self.action.kind not in COMMUNICATION:
            raise ValueError(
                f"{describe_action(self.action)} transfers nothing that could be ready after "
                f"{describe_action(self.after)}"
            )


def describe_action(action: Action) -> str:
    """Return an action in words: "the receive of the gradient of h3 of microbatch 1 on stage 2 from 4"."""
    value = "" if action.value is None else f" of {'the gradient of ' if action.gradient else ''}{action.value}"
    microbatch = "" if action.microbatch is None else f" of microbatch {action.microbatch}"
    end = "from" if action.kind is ActionKind.RECEIVE else "to"
    whom = "" if action.peer is None else f" {end} {action.peer}"
    return f"the {action.kind}{value}{microbatch} on stage {action.stage}{whom}"
