"""Sums over workers of one host: each reads all summands, or adds up one part, or two ranks go chunk by chunk.

Small sums take one step: every rank reads all others' summands. Large ones of more than two ranks take two
(reduce-scatter, all-gather): every rank adds up one part, which the others then read, the same bytes as in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polylane.runtime.transport.hub import Hub
from polylane.runtime.transport.message import Message, told
from polylane.runtime.transport.under_way import Group, check

LAST = 1  # added to the key of an operation: its second message
CHUNK = 1 << 20  # bytes of a sum in turns that are copied, then added
PLACES = 4  # chunks that are in memory at once: those of both ranks fit in most last-level caches


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
            flat = self._wire if self._wire.dim() == 1 else self._wire.view(-1)
            parts = [message.tensor(flat.dtype) for message in messages]
            add_in_place(parts[: self._group.index], flat, parts[self._group.index :])
            self._hub.answer(*messages)
            if self._target.data_ptr() != self._wire.data_ptr():
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


class SumInTurns:
    """A large sum of two ranks, a chunk at a time: what one has copied the other adds while it is still in the cache.

    Each shows its next chunk when the other one's has come, then adds that: in whatever wait it is then. The chunks lie
    in a few places in turn. The peer has shown its chunk i before it added chunk i - 1, and after it had added chunk
    i - 2: whatever is older may be overwritten once chunk i has come. (64 MB: 10 ms; as :class:`Sum`, which puts all of
    it through main memory five times, 17 ms.) Arguments: see :class:`Sum`.
    """

    __slots__ = (
        "_added",
        "_block",
        "_chunk",
        "_description",
        "_error",
        "_hub",
        "_key",
        "_last",
        "_peer",
        "_target",
        "_wire",
    )

    def __init__(self, hub: Hub, group: Group, key: int, description: bytes, wire: Tensor, target: Tensor) -> None:
        self._hub, self._peer, self._key = hub, group.peers[0], key
        self._description, self._wire, self._target = description, wire.view(-1), target
        self._chunk = CHUNK // wire.element_size()
        self._added = 0
        self._last: Message | None = None
        self._error: Exception | None = None

    def start(self) -> int:
        """Show the peer the first chunk. Returns bytes of headers."""
        with self._hub.lock:
            self._block = self._hub.block(PLACES * CHUNK, 1)
            headers = self._show(0)
            self._hub.expect(self._peer, self._key, self._came)
        return headers * -(-self._wire.numel() // self._chunk)

    def _show(self, number: int) -> int:
        part, place = self._part(number), number % PLACES * self._chunk
        self._block.view(part.dtype, part.numel(), place).copy_(part)
        offset = place * part.element_size()
        return self._hub.show(
            (self._peer,), self._key + number % 2, self._description, self._block, offset, part.nbytes
        )

    def _part(self, number: int) -> Tensor:
        return self._wire[number * self._chunk : (number + 1) * self._chunk]

    def _came(self) -> None:
        """Another chunk of the peer's; an error is for this operation's own wait to raise."""
        number = self._added
        message = self._hub.links[self._peer].inbox.pop(self._key + number % 2)
        try:
            check(self._hub, self._description, message)
            last = (number + 1) * self._chunk >= self._wire.numel()
            if not last:
                self._show(number + 1)
            part = self._part(number)
            part += message.tensor(part.dtype)
        except Exception as error:
            self._error = error
            return
        self._added += 1
        if last:
            self._last = message
        else:
            self._hub.expect(self._peer, self._key + self._added % 2, self._came)

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`.

        Raises:
            ValueError: the peer gave another shape or dtype.
        """
        if self._peer >= 0:
            self._hub.wait(self._peer, lambda: self._last is not None or self._error is not None, self)
            if self._error is not None:
                raise self._error
            assert self._last is not None
            self._hub.answer(self._last)  # for all of them: they were in one block
            if self._target.data_ptr() != self._wire.data_ptr():
                self._target.copy_(self._wire.view(self._target.shape))
            self._peer = -1
        return self._target

    def doing(self) -> str:
        """See :class:`.hub.Doing`."""
        return f"taking part in {told(self._description)} with rank {self._peer}"


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
