"""All-reduce over the workers of one host: in one step, in two (reduce-scatter, all-gather), or chunk by chunk.

    ranks      bytes of the tensor     class         bytes that each rank reads, of n, over p ranks
    2          up to IN_TURNS          Sum           n
    2          more                    SumInTurns    n
    3 or more  up to INLINE            Sum           n (p - 1)
    3 or more  more                    SumInParts    2 n (p - 1) / p, as in a ring (Patarasuk and Yuan 2009)

All add up in the order of the ranks, so that every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polylane.runtime.transport.protocol import Deferred, copy_back
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.message import Message, format_description
from polylane.runtime.transport.shared_memory.pending import RankGroup, check_message

LAST = 1  # added to the key of an operation: its second message
CHUNK = 1 << 20  # bytes of a sum in turns that are copied, then added
PLACES = 4  # chunks that are in memory at once: those of both ranks fit in most last-level caches


class _PendingSum(Deferred[Tensor]):
    """A sum over a group, under way; its wait raises ValueError where a peer gave another shape or dtype.

    Args:
        hub: lines to the other workers of this host.
        group: the ranks that sum, as this worker sees them.
        key: of the operation's first message; ``key | LAST`` is that of its second.
        description: of the values that every rank gives; see :func:`.message.described`.
        wire: this rank's values, contiguous; overwritten by the sum.
        target: the caller's tensor, which gets the sum too where it has other memory than ``wire``.
    """

    __slots__ = ("_description", "_error", "_group", "_hub", "_key", "_target", "_wire")

    def __init__(
        self, hub: MessageHub, group: RankGroup, key: int, description: bytes, wire: Tensor, target: Tensor
    ) -> None:
        super().__init__()
        self._hub, self._group, self._key, self._description = hub, group, key, description
        self._wire, self._target = wire if wire.dim() == 1 else wire.view(-1), target
        self._error: Exception | None = None  # of a step that was taken in the wait of another operation

    def _complete(self) -> None:
        """Wait for the other ranks, until ``wire`` has the sum."""
        raise NotImplementedError

    def _finish(self) -> Tensor:
        self._complete()
        return copy_back(self._wire, self._target)

    def describe_wait(self) -> str:
        return f"taking part in {format_description(self._description)} over ranks {self._group.members}"


class DirectSum(_PendingSum):
    """A small sum: every rank reads every other one's values and adds them all up.

        rank             0              1              2
        gives to all     a0             a1             a2
        computes         a0 + a1 + a2   a0 + a1 + a2   a0 + a1 + a2    in the order of the ranks: the same bits

    Arguments: as of :class:`_PendingSum`.
    """

    __slots__ = ()

    def _complete(self) -> None:
        messages = [self._hub.receive_message(peer, self._key, self) for peer in self._group.peers]
        for message in messages:
            check_message(self._hub, self._description, message)
        parts = [message.as_tensor(self._wire.dtype) for message in messages]
        sum_parts_in_place(parts[: self._group.index], self._wire, parts[self._group.index :])
        self._hub.release_messages(*messages)


class TwoStepSum(_PendingSum):
    """A large sum in two steps, reduce-scatter and all-gather: every rank adds up one part, the others then read it.

    With three ranks, whose values have the parts a, b and c; capitals are sums:

        rank                         0            1            2
        its block at the start       .  b0 c0     a1 .  c1     a2 b2 .      shown with the message ``key``
        reads of the other blocks    a1 a2        b0 b2        c0 c1
        its block after adding up    A  b0 c0     a1 B  c1     a2 b2 C      shown with the message ``key | LAST``
        reads of the other blocks    B  C         A  C         A  B

    Adding up comes when the last part has: in whatever wait this rank is then. A block is its owner's again when every
    peer has answered for both messages. Arguments: as of :class:`_PendingSum`.
    """

    __slots__ = ("_bounds", "_missing")

    def __init__(
        self, hub: MessageHub, group: RankGroup, key: int, description: bytes, wire: Tensor, target: Tensor
    ) -> None:
        super().__init__(hub, group, key, description, wire, target)
        count, ranks = wire.numel(), len(group.members)
        self._bounds = [count * i // ranks for i in range(ranks + 1)]
        self._missing = len(group.peers)

    def start_sum(self) -> int:
        """Show every peer what it is to add up. Returns bytes of headers."""
        hub, flat, item = self._hub, self._wire, self._wire.element_size()
        headers = 0
        with hub.lock:
            block = hub.acquire_block(flat.nbytes, 2 * len(self._group.peers))
            own = slice(self._bounds[self._group.index], self._bounds[self._group.index + 1])
            view = block.view(flat.dtype, flat.numel())
            view[: own.start].copy_(flat[: own.start])
            view[own.stop :].copy_(flat[own.stop :])

            def came() -> None:
                self._missing -= 1
                if self._missing == 0:
                    try:
                        self._add_parts(view[own], flat[own])
                        nbytes = (own.stop - own.start) * item
                        hub.send_block(
                            self._group.peers, self._key | LAST, self._description, block, own.start * item, nbytes
                        )
                    except Exception as error:  # to be raised by this operation's wait, not by the one that saw it
                        self._error = error

            for index, peer in enumerate(self._group.members):
                if index != self._group.index:
                    start, nbytes = self._bounds[index] * item, (self._bounds[index + 1] - self._bounds[index]) * item
                    headers += hub.send_block([peer], self._key, self._description, block, start, nbytes)
            for peer in self._group.peers:
                hub.call_when_received(peer, self._key, came)
        return headers

    def _add_parts(self, total: Tensor, own: Tensor) -> None:
        """Add up this rank's part of all values.

        Args:
            total: in this rank's block; overwritten by the sum.
            own: this rank's values, overwritten as well.
        """
        messages = [self._hub.links[peer].inbox[self._key] for peer in self._group.peers]
        for message in messages:
            check_message(self._hub, self._description, message)
        parts = [message.as_tensor(own.dtype) for message in messages]
        parts.insert(self._group.index, own)
        sum_parts(parts, total)
        own.copy_(total)

    def _complete(self) -> None:
        for peer in self._group.peers:  # all of them, before any is taken: adding up needs all
            self._hub.peek_message(peer, self._key, self)
        summands = [self._hub.receive_message(peer, self._key, self) for peer in self._group.peers]
        if self._error is not None:
            raise self._error
        for index, peer in enumerate(self._group.members):
            if index == self._group.index:
                continue
            part = self._hub.receive_message(peer, self._key | LAST, self)
            self._wire[self._bounds[index] : self._bounds[index + 1]].copy_(part.as_tensor(self._wire.dtype))
            self._hub.release_messages(part)
        self._hub.release_messages(*summands)


class ChunkedSum(_PendingSum):
    """A large sum of two ranks, a chunk at a time: what one has copied the other adds while it is still in the cache.

    Each rank shows its next chunk when the other one's has come, then adds that: in whatever wait it is then.

        has come    -          chunk 0    chunk 1    chunk 2    chunk 3    chunk 4
        shows       0 at [0]   1 at [1]   2 at [2]   3 at [3]   4 at [0]   5 at [1]     [i]: places of its block
        adds                   0          1          2          3          4

    The peer has shown its chunk i before it added chunk i - 1, and after it had added chunk i - 2: whatever is older
    may be overwritten once chunk i has come. (64 MB: 10 ms; as :class:`DirectSum`, which puts all of it through main
    memory five times, 17 ms.) Arguments: as of :class:`_PendingSum`.
    """

    __slots__ = ("_added", "_block", "_chunk", "_last", "_peer")

    def __init__(
        self, hub: MessageHub, group: RankGroup, key: int, description: bytes, wire: Tensor, target: Tensor
    ) -> None:
        super().__init__(hub, group, key, description, wire, target)
        self._peer = group.peers[0]
        self._chunk = CHUNK // wire.element_size()
        self._added = 0
        self._last: Message | None = None

    def start_sum(self) -> int:
        """Show the peer the first chunk. Returns bytes of headers."""
        with self._hub.lock:
            self._block = self._hub.acquire_block(PLACES * CHUNK, 1)
            headers = self._send_chunk(0)
            self._hub.call_when_received(self._peer, self._key, self._add_chunk)
        return headers * -(-self._wire.numel() // self._chunk)

    def _send_chunk(self, number: int) -> int:
        part, place = self._chunk_of(number), number % PLACES * self._chunk
        self._block.view(part.dtype, part.numel(), place).copy_(part)
        offset = place * part.element_size()
        return self._hub.send_block(
            (self._peer,), self._key + number % 2, self._description, self._block, offset, part.nbytes
        )

    def _chunk_of(self, number: int) -> Tensor:
        return self._wire[number * self._chunk : (number + 1) * self._chunk]

    def _add_chunk(self) -> None:
        """Another chunk of the peer's; an error is for this operation's own wait to raise."""
        number = self._added
        message = self._hub.links[self._peer].inbox.pop(self._key + number % 2)
        try:
            check_message(self._hub, self._description, message)
            last = (number + 1) * self._chunk >= self._wire.numel()
            if not last:
                self._send_chunk(number + 1)
            part = self._chunk_of(number)
            part += message.as_tensor(part.dtype)
        except Exception as error:
            self._error = error
            return
        self._added += 1
        if last:
            self._last = message
        else:
            self._hub.call_when_received(self._peer, self._key + self._added % 2, self._add_chunk)

    def _complete(self) -> None:
        self._hub.wait_until(self._peer, lambda: self._last is not None or self._error is not None, self)
        if self._error is not None:
            raise self._error
        assert self._last is not None
        self._hub.release_messages(self._last)  # for all of them: they were in one block

    def describe_wait(self) -> str:
        return f"taking part in {format_description(self._description)} with rank {self._peer}"


def sum_parts(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add up two or more parts in their order.

    Args:
        parts: of one shape and dtype; left as they are.
        total: overwritten by the sum; none of the parts' memory.
    """
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part


def sum_parts_in_place(before: Sequence[Tensor], own: Tensor, after: Sequence[Tensor]) -> None:
    """Add up parts in their order, in the memory of one of them: the same bits wherever that one stands.

    Args:
        before, after: parts that come before and after ``own`` in the order; left as they are.
        own: one of the parts; overwritten by the sum.
    """
    if len(before) == 1:
        torch.add(before[0], own, out=own)
    elif before:
        total = before[0] + before[1]
        for part in before[2:]:
            total += part
        torch.add(total, own, out=own)
    for part in after:
        own += part
