"""Pending operations over shared memory: what is left to do until they are done.

Every operation has put its own values where the others find them before it becomes one of these: what is left is to
wait for the others' and to read them. Only large sums have steps in between, see :mod:`.sums`.
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
    """Ranks that run collectives together, as one of them sees it.

    Attributes:
        members: all its ranks, in order.
        index: of this rank among them.
        peers: the others, in order.
        key: of the latest collective; each takes two keys.
    """

    members: tuple[int, ...]
    index: int
    peers: tuple[int, ...]
    key: int

    def next_key(self) -> int:
        """The key of one more collective."""
        self.key += 2
        return self.key


class PendingReceive(Deferred[Tensor]):
    """A tensor that a peer sends, by itself or as its piece of an exchange.

    Args:
        hub: lines to the other workers of this host.
        peer: the rank that sends.
        key: of the message, the same at both ends.
        dtype, shape: of the tensor, which the peer must agree on.
        kind: what the peer was asked for: SEND or EXCHANGE of :mod:`.message`.
    """

    __slots__ = ("_dtype", "_hub", "_key", "_kind", "_peer", "_shape")

    def __init__(
        self, hub: MessageHub, peer: int, key: int, dtype: torch.dtype, shape: tuple[int, ...], kind: int = SEND
    ) -> None:
        super().__init__()
        self._hub, self._peer, self._key, self._kind = hub, peer, key, kind
        self._dtype, self._shape = dtype, shape

    def _finish(self) -> Tensor:
        message = self._hub.receive_message(self._peer, self._key, self)
        check_message(self._hub, encode_description(self._kind, self._dtype, self._shape), message)
        return self._hub.tensor_of(message, self._dtype, self._shape)

    def describe_wait(self) -> str:
        return f"receiving {self._dtype} {self._shape}"


class PendingCollective(Deferred[Tensor]):
    """A collective that takes one message from some of the members of a group.

    Args:
        hub: lines to the other workers of this host.
        members: ranks of the group, in order.
        key: of the collective's messages, the same at all members.
        expected: by rank, the description of what each of these peers gives.
        make: makes the result of the messages, by rank; they are answered for afterwards.
    """

    __slots__ = ("_expected", "_hub", "_key", "_make", "_members")

    def __init__(
        self,
        hub: MessageHub,
        members: Sequence[int],
        key: int,
        expected: dict[int, bytes],
        make: Callable[[dict[int, Message]], Tensor],
    ) -> None:
        super().__init__()
        self._hub, self._members, self._key = hub, members, key
        self._expected, self._make = expected, make

    def _finish(self) -> Tensor:
        messages = {peer: self._hub.receive_message(peer, self._key, self) for peer in self._expected}
        for peer, description in self._expected.items():
            check_message(self._hub, description, messages[peer])
        result = self._make(messages)
        self._hub.release_messages(*messages.values())
        return result

    def describe_wait(self) -> str:
        return (
            f"taking part in {format_description(next(iter(self._expected.values())))} over ranks "
            f"{tuple(self._members)}"
        )


class PendingExchange(Deferred[list[Tensor]]):
    """A piece from every rank of a group.

    Args:
        parts: one for each rank: a tensor that is there already, or one that comes.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Tensor | PendingReceive]) -> None:
        super().__init__()
        self._parts = parts

    def _finish(self) -> list[Tensor]:
        return [part if isinstance(part, Tensor) else part.wait() for part in self._parts]


def check_message(hub: MessageHub, expected: bytes, message: Message) -> None:
    """Refuse values that are not what this rank asked for.

    Raises:
        ValueError: they are not.
    """
    if message.description != expected:
        raise mismatch_error(hub.rank, expected, message)


def part_slices(sizes: Sequence[int]) -> list[slice]:
    """The places of parts that follow one another in a vector, for their numbers of elements."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def slice_length(part: slice) -> int:
    """Number of elements of a part."""
    return int(part.stop - part.start)
