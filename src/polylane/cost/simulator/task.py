"""Tasks: what the lanes of a step do and how long it takes undisturbed, for
`polylane.cost.simulator.simulate.simulate_tasks`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from polylane.schedule.action import COMMUNICATION, Action, ActionKind


@dataclass(frozen=True, slots=True)
class TransferTime:
    """How something moves when nothing disturbs it. One object may serve all messages of a kind.

    Attributes:
        seconds: from its start until it has left: for so long it takes its links and keeps its channel.
        latency: seconds from then until it has arrived, in which it takes and keeps nothing.
        links: the shared links it takes, by any name, each with how much of it, in the unit of the link's capacity (a
            link whose capacity is not told has 1: then the amount is a share of it).
        cpu: the share of a core that it takes in every lane it concerns (of a message: its sender's and its
            receiver's), for as long as it takes its links. Two cores' worth of it is 2.

    Raises:
        ValueError: a figure that is negative or no number.
    """

    seconds: float = 0
    latency: float = 0
    links: Mapping[Hashable, float] = field(default_factory=dict)
    cpu: float = 0

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("latency", self.latency), ("cpu", self.cpu)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of a transfer must be at least 0, not {value}")
        for link, amount in self.links.items():
            if not 0 < amount < math.inf:
                raise ValueError(f"a transfer must take more than 0 of link {link!r}, not {amount}")


NOTHING = TransferTime()


@dataclass(frozen=True, slots=True)
class Task:
    """One action of one lane.

    Attributes:
        action: what it is. Kinds other than send, receive and reduce compute. A step waits for all of the lane's
            overlapped reductions before it.
        seconds: for which it keeps the lane undisturbed: a pass, or the packing and unpacking of a message.
        waited: how much of them goes by in collectives inside the action; cores that are shared do not slow it.
        bytes: what the lane hands over or gets (`polylane.observe.timeline.Span.bytes`).
        key: of a send and its receive, or of a reduction in all its lanes, the same; the n-th send of a key meets the
            n-th receive. Default, where lanes are ranks: of a message its ends, value, microbatch and direction; of a
            reduction its value and lanes. A receive of a key that its own lane reduces waits for that reduction.
        transfer: of a send or a reduction, how it moves.
        lanes: of a reduction, who takes part; default: its lane alone.
        channel: transfers that a lane asks for on one channel move one after another, in the order of its tasks.
            Default: a channel for every peer, and one for all reductions.
        after: of a task that transfers: an earlier computing task of the lane (the last one of that action) from which
            on the lane is ready for the transfer, though it reaches this task later. Default: a send or reduction may
            start when the lane has reached it, and a receive is ready for its message at any time.
        fraction: how much of ``after`` must be done: 0 its start, 1 its end. Buckets of gradients are complete in the
            course of the last backward pass.
        overlapped: of a reduction: whether the lane goes on at once; else it waits until the reduction is done.

    Raises:
        ValueError: figures that mean nothing, or that this kind of action does not have.
    """

    action: Action
    seconds: float = 0
    waited: float = 0
    bytes: int = 0
    key: Hashable = None
    transfer: TransferTime = NOTHING
    lanes: tuple[int, ...] = ()
    channel: Hashable = None
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
    """An action in words: "the receive of the gradient of h3 of microbatch 1 on stage 2 from 4"."""
    what = "" if action.value is None else f" of {'the gradient of ' if action.gradient else ''}{action.value}"
    which = "" if action.microbatch is None else f" of microbatch {action.microbatch}"
    end = "from" if action.kind is ActionKind.RECEIVE else "to"
    whom = "" if action.peer is None else f" {end} {action.peer}"
    return f"the {action.kind}{what}{which} on stage {action.stage}{whom}"
