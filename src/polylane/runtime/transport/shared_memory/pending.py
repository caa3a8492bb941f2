"""Pending operations over shared memory: waiting for the messages of other ranks, and reading them.

An operation has already sent its own values when it becomes one of these, so its wait depends on other ranks only.
Large sums have further steps in between, see :mod:`.reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polylane.runtime.transport.protocol import Deferred
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.message import (
    SEND,
    Message,
    encode_description,
    format_description,
    mismatch_error,
)


@dataclass(slots=True)
class RankGroup:
    """A declared group of ranks, from the view of one of them.

    Attributes:
        members: all ranks of the group, ascending.
        index: index of this rank in ``members``.
        peers: the other ranks of the group, ascending.
        key: key of the group's latest collective; each uses two, for up to two messages from a rank.
    """

    members: tuple[int, ...]
    index: int
    peers: tuple[int, ...]
    key: int

    def next_key(self) -> int:
        """Return the key of the next collective: equal at all members, which call collectives in one order."""
        self.key += 2
        return self.key


def receive_tensor(
    hub: MessageHub, peer: int, key: int, dtype: torch.dtype, shape: tuple[int, ...], kind: int = SEND
) -> Deferred[Tensor]:
    """Return a pending tensor from a peer, of a send or of an exchange.

    Args:
        hub: connections to the other workers of this host.
        peer: rank that sends the tensor.
        key: key of the message, the same at both ends.
        dtype: expected dtype, the same at both ends.
        shape: expected shape, the same at both ends.
        kind: operation of the peer: SEND or EXCHANGE of :mod:`.message`.
    """

    def finish() -> Tensor:
        message = hub.receive_message(peer, key, lambda: f"receiving {dtype} {shape}")
        check_message(hub, encode_description(kind, dtype, shape), message)
        return hub.tensor_of(message, dtype, shape)

    return Deferred(finish)


def receive_from_members(
    hub: MessageHub,
    members: Sequence[int],
    key: int,
    expected: dict[int, bytes],
    make: Callable[[dict[int, Message]], Tensor],
) -> Deferred[Tensor]:
    """Return the pending result of a collective that needs one message from some of the members of a group.

    Args:
        hub: connections to the other workers of this host.
        members: all ranks of the group, ascending.
        key: key of the collective's messages, the same at all members.
        expected: description of the message that each of these peers sends, by rank.
        make: builds the result from the messages by rank; their blocks are released afterwards.
    """

    def describe_wait() -> str:
        return f"taking part in {format_description(next(iter(expected.values())))} over ranks {tuple(members)}"

    def finish() -> Tensor:
        # All messages before any is checked: a mismatch then leaves none behind in the inbox.
        messages = {peer: hub.receive_message(peer, key, describe_wait) for peer in expected}
        for peer, description in expected.items():
            check_message(hub, description, messages[peer])
        result = make(messages)
        hub.release_messages(*messages.values())
        return result

    return Deferred(finish)


def check_message(hub: MessageHub, expected: bytes, message: Message) -> None:
    """Refuse a message of another operation, dtype or shape than this rank expects.

    Raises:
        ValueError: the descriptions differ; the error names both.
    """
    if message.description != expected:
        raise mismatch_error(hub.rank, expected, message)


def part_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of consecutive parts of a vector, for their numbers of elements."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def slice_length(part: slice) -> int:
    """Return the number of elements of a slice with begin and end."""
    return int(part.stop - part.start)
