"""Operations between workers of one host that have been asked for: what is left to do until they are done.

Every operation has put its own values where the others find them before it becomes one of these: what is left is to
wait for the others' and to read them. Only large sums have steps in between, see :mod:`.sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polylane.runtime.transport.hub import Hub
from polylane.runtime.transport.message import SEND, Message, described, mismatch, told


@dataclass(slots=True)
class Group:
    """Ranks that run collectives together, as one of them sees it.

    Attributes:
        members: in order.
        index: of this rank among them.
        peers: the others, in order.
        key: of the next collective.
    """

    members: tuple[int, ...]
    index: int
    peers: tuple[int, ...]
    key: int

    def next(self) -> int:
        """The key of one more collective."""
        self.key += 2
        return self.key


class Receive:
    """A tensor that a peer sends, by itself or as its piece of an exchange (``kind``)."""

    __slots__ = ("_dtype", "_hub", "_key", "_kind", "_peer", "_result", "_shape")

    def __init__(
        self, hub: Hub, peer: int, key: int, dtype: torch.dtype, shape: tuple[int, ...], kind: int = SEND
    ) -> None:
        self._hub, self._peer, self._key, self._kind = hub, peer, key, kind
        self._dtype, self._shape = dtype, shape
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`.

        Raises:
            ValueError: the peer sent another shape or dtype.
        """
        if self._result is None:
            message = self._hub.take(self._peer, self._key, self)
            check(self._hub, described(self._kind, self._dtype, self._shape), message)
            self._result = self._hub.kept(message, self._dtype, self._shape)
        return self._result

    def doing(self) -> str:
        """See :class:`.hub.Doing`."""
        return f"receiving {self._dtype} {self._shape}"


class Collected:
    """Something over a group that takes one message from some of its members.

    Args:
        key: of the operation.
        expected: the description of what each peer gives, by rank.
        finish: makes the result of the messages, by rank.
    """

    __slots__ = ("_expected", "_finish", "_hub", "_key", "_members", "_result")

    def __init__(
        self,
        hub: Hub,
        members: Sequence[int],
        key: int,
        expected: dict[int, bytes],
        finish: Callable[[dict[int, Message]], Tensor],
    ) -> None:
        self._hub, self._members, self._key = hub, members, key
        self._expected, self._finish = expected, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`.

        Raises:
            ValueError: a peer gave another shape or dtype.
        """
        if self._result is None:
            messages = {peer: self._hub.take(peer, self._key, self) for peer in self._expected}
            for peer, description in self._expected.items():
                check(self._hub, description, messages[peer])
            self._result = self._finish(messages)
            self._hub.answer(*messages.values())
        return self._result

    def doing(self) -> str:
        """See :class:`.hub.Doing`."""
        return f"taking part in {told(next(iter(self._expected.values())))} over ranks {tuple(self._members)}"


class Exchange:
    """A piece from every rank of a group.

    Args:
        parts: by rank: what is there already, or comes.
    """

    __slots__ = ("_parts", "_result")

    def __init__(self, parts: Sequence[Tensor | Receive]) -> None:
        self._parts = parts
        self._result: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """See :meth:`.protocol.Outcome.wait`."""
        if self._result is None:
            self._result = [part if isinstance(part, Tensor) else part.wait() for part in self._parts]
        return self._result


def check(hub: Hub, expected: bytes, message: Message) -> None:
    """Refuse values that are not what this rank asked for.

    Raises:
        ValueError: they are not.
    """
    if message.description != expected:
        raise mismatch(hub.rank, expected, message)


def places(sizes: Sequence[int]) -> list[slice]:
    """Where parts lie that follow one another."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def length(part: slice) -> int:
    """Its elements."""
    return int(part.stop - part.start)
