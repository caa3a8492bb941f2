"""Operations between workers of one host that have been asked for: what is left to do until they are done.

Every operation has put its own values where the others find them before it becomes one of these: what is left is to
wait for the others' and to read them. Only a large sum over more than two ranks has a step in between, see
:class:`SumInParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.runtime.transport.hub import Hub
from polylane.runtime.transport.message import SEND, Message, described, mismatch, told

LAST = 1  # added to the key of an operation: the second message of the same one


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


class Sum:
    """A sum of which every rank reads every other one's summand: one message from each.

    Args:
        group: over which.
        key: of the operation.
        description: of a summand.
        wire: this rank's summand, contiguous; becomes the sum.
        target: where the caller looks for it.
    """

    __slots__ = ("_description", "_done", "_group", "_hub", "_key", "_target", "_wire")

    def __init__(self, hub: Hub, group: Group, key: int, description: bytes, wire: Tensor, target: Tensor) -> None:
        self._hub, self._group, self._key = hub, group, key
        self._description, self._wire, self._target = description, wire, target
        self._done = False

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`.

        Raises:
            ValueError: a peer gave another shape or dtype.
        """
        if not self._done:
            messages = [self._hub.take(peer, self._key, self) for peer in self._group.peers]
            for message in messages:
                check(self._hub, self._description, message)
            flat = self._wire.view(-1)
            parts = [message.tensor(flat.dtype) for message in messages]
            add_in_place(parts[: self._group.index], flat, parts[self._group.index :])
            self._hub.answer(*messages)
            if self._target is not self._wire and self._target.data_ptr() != self._wire.data_ptr():
                self._target.copy_(self._wire)
            self._done = True
        return self._target

    def doing(self) -> str:
        """See :class:`.hub.Doing`."""
        return f"taking part in {told(self._description)} over ranks {self._group.members}"


class SumInParts:
    """A sum of which every rank adds up one part, which the others then read: the same bytes as in a ring.

    Adding up comes when the last summand has: in whatever wait this rank is then. It lies in the block that held the
    summands, in the place of this rank's own part. Arguments: see :class:`Sum`.
    """

    __slots__ = ("_bounds", "_description", "_done", "_error", "_group", "_hub", "_key", "_missing", "_target", "_wire")

    def __init__(self, hub: Hub, group: Group, key: int, description: bytes, wire: Tensor, target: Tensor) -> None:
        self._hub, self._group, self._key = hub, group, key
        self._description, self._wire, self._target = description, wire.view(-1), target
        count, ranks = wire.numel(), len(group.members)
        self._bounds = [count * i // ranks for i in range(ranks + 1)]
        self._missing = len(group.peers)
        self._error: Exception | None = None
        self._done = False

    def start(self) -> int:
        """Show every peer what it is to add up. Returns bytes of headers."""
        hub, flat, item = self._hub, self._wire, self._wire.element_size()
        headers = 0
        with hub.lock:
            block = hub.block(flat.nbytes, 2 * len(self._group.peers))
            own = slice(self._bounds[self._group.index], self._bounds[self._group.index + 1])
            view = block.view(flat.dtype, flat.numel())
            view[: own.start].copy_(flat[: own.start])
            view[own.stop :].copy_(flat[own.stop :])

            def came() -> None:
                self._missing -= 1
                if self._missing == 0:
                    try:
                        self._add(view[own], flat[own])
                        nbytes = (own.stop - own.start) * item
                        hub.show(
                            self._group.peers, self._key | LAST, self._description, block, own.start * item, nbytes
                        )
                    except Exception as error:  # to be raised by this operation's wait, not by the one that saw it
                        self._error = error

            for index, peer in enumerate(self._group.members):
                if index != self._group.index:
                    start, nbytes = self._bounds[index] * item, (self._bounds[index + 1] - self._bounds[index]) * item
                    headers += hub.show([peer], self._key, self._description, block, start, nbytes)
            for peer in self._group.peers:
                hub.expect(peer, self._key, came)
        return headers

    def _add(self, total: Tensor, own: Tensor) -> None:
        messages = [self._hub.links[peer].inbox[self._key] for peer in self._group.peers]
        for message in messages:
            check(self._hub, self._description, message)
        parts = [message.tensor(own.dtype) for message in messages]
        parts.insert(self._group.index, own)
        add(parts, total)
        own.copy_(total)

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`.

        Raises:
            ValueError: a peer gave another shape or dtype.
        """
        if not self._done:
            for peer in self._group.peers:  # all of them, before any is taken: adding up needs all
                self._hub.see(peer, self._key, self)
            summands = [self._hub.take(peer, self._key, self) for peer in self._group.peers]
            if self._error is not None:
                raise self._error
            for index, peer in enumerate(self._group.members):
                if index == self._group.index:
                    continue
                part = self._hub.take(peer, self._key | LAST, self)
                self._wire[self._bounds[index] : self._bounds[index + 1]].copy_(part.tensor(self._wire.dtype))
                self._hub.answer(part)
            self._hub.answer(*summands)
            if self._target.data_ptr() != self._wire.data_ptr():
                self._target.copy_(self._wire.view(self._target.shape))
            self._done = True
        return self._target

    def doing(self) -> str:
        """See :class:`.hub.Doing`."""
        return f"taking part in {told(self._description)} over ranks {self._group.members}"


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


def add(parts: Sequence[Tensor], total: Tensor) -> None:
    """The sum of two or more parts, added up in their order, in memory that is none of theirs."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part


def add_in_place(before: Sequence[Tensor], own: Tensor, after: Sequence[Tensor]) -> None:
    """Add up parts in their order, in the memory of one of them: the same bits wherever that one stands."""
    if len(before) == 1:
        torch.add(before[0], own, out=own)
    elif before:
        total = before[0] + before[1]
        for part in before[2:]:
            total += part
        torch.add(total, own, out=own)
    for part in after:
        own += part
