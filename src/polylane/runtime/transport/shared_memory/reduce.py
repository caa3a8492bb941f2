"""Shared-memory all-reduce: in one step, in two (reduce-scatter, all-gather), or chunk by chunk.

    ranks        bytes of the tensor    class         bytes that each rank reads, of n, over p ranks
    2            up to IN_TURNS         DirectSum     n
    2            more                   ChunkedSum    n
    3 or more    up to INLINE           DirectSum     n (p - 1)
    3 or more    more                   TwoStepSum    2 n (p - 1) / p, as in a ring (Patarasuk and Yuan 2009)

All sums add up in the order of the ranks, so that every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polylane.runtime.transport.protocol import Deferred, copy_back, make_contiguous
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.message import SUM, Message, encode_description, format_description
from polylane.runtime.transport.shared_memory.pending import RankGroup, check_message

LAST = 1  # bit of the key of an operation's second message
CHUNK = 1 << 20  # bytes of a chunk of ChunkedSum, which is copied, then added
PLACES = 4  # chunks in a block of ChunkedSum: those of both ranks fit in most last-level caches


class PendingSum(Deferred[Tensor]):
    """A pending sum over a group; its wait raises ValueError if a peer sent another shape or dtype.

    Args:
        hub: connections to the other workers of this host.
        group: ranks that sum, from the view of this worker.
        tensor: this rank's values; overwritten by the sum.
    """

    __slots__ = ("_description", "_error", "_group", "_hub", "_key", "_target", "_wire")

    def __init__(self, hub: MessageHub, group: RankGroup, tensor: Tensor) -> None:
        super().__init__(self._finish_sum)
        # The operation's first message has the key, its second one ``key | LAST``.
        self._hub, self._group, self._key = hub, group, group.next_key()
        wire = make_contiguous(tensor)
        self._description = encode_description(SUM, wire.dtype, tuple(wire.shape))
        self._wire, self._target = wire if wire.dim() == 1 else wire.view(-1), tensor.detach()
        self._error: Exception | None = None  # raised in a callback, so in the wait of another operation

    def start_sum(self) -> int:
        """Send the other ranks what they need first, and return the bytes of headers of all messages."""
        raise NotImplementedError

    def _complete(self) -> None:
        """Wait for the other ranks until ``wire`` has the sum."""
        raise NotImplementedError

    def _finish_sum(self) -> Tensor:
        self._complete()
        return copy_back(self._wire, self._target)

    def describe_wait(self) -> str:
        return f"taking part in {format_description(self._description)} over ranks {self._group.members}"


class DirectSum(PendingSum):
    """A small sum in one step: every rank reads the values of all others and adds them up.

        rank             0               1               2
        sends to all     a0              a1              a2
        computes         a0 + a1 + a2    a0 + a1 + a2    a0 + a1 + a2    in the order of the ranks: the same bits

    Arguments: the same as of :class:`PendingSum`.
    """

    __slots__ = ()

    def start_sum(self) -> int:
        return self._hub.send_values(self._group.peers, self._key, self._description, self._wire)

    def _complete(self) -> None:
        messages = [self._hub.receive_message(peer, self._key, self.describe_wait) for peer in self._group.peers]
        for message in messages:
            check_message(self._hub, self._description, message)
        parts = [message.as_tensor(self._wire.dtype) for message in messages]
        sum_parts_in_place(parts[: self._group.index], self._wire, parts[self._group.index :])
        self._hub.release_messages(*messages)


class TwoStepSum(PendingSum):
    """A large sum in two steps, reduce-scatter and all-gather: every rank sums one part, the others then read it.

    With three ranks, whose values have the parts a, b and c; capitals are sums:

        step    rank                       0            1            2
        1       own block at the start     .  b0 c0     a1 .  c1     a2 b2 .      sent with message ``key``
                reads of other blocks      a1 a2        b0 b2        c0 c1
        2       own block with its sum     A  b0 c0     a1 B  c1     a2 b2 C      sent with message ``key | LAST``
                reads of other blocks      B  C         A  C         A  B

    A rank sums its part when the last message of step 1 arrives, in whatever wait it is then. A block is free
    when every peer has answered both messages. Arguments: as of :class:`PendingSum`.
    """

    __slots__ = ("_bounds", "_missing")

    def __init__(self, hub: MessageHub, group: RankGroup, tensor: Tensor) -> None:
        super().__init__(hub, group, tensor)
        count, ranks = tensor.numel(), len(group.members)
        self._bounds = [count * i // ranks for i in range(ranks + 1)]
        self._missing = len(group.peers)

    def start_sum(self) -> int:
        # Step 1: every peer gets the part that it sums.
        hub, flat, item = self._hub, self._wire, self._wire.element_size()
        headers = 0
        with hub.lock:
            # Each peer answers twice: for its part, and for this rank's sum. The own part is written by _add_parts.
            block = hub.acquire_block(flat.nbytes, 2 * len(self._group.peers))
            own_slice = slice(self._bounds[self._group.index], self._bounds[self._group.index + 1])
            view = block.view(flat.dtype, flat.numel())
            view[: own_slice.start].copy_(flat[: own_slice.start])
            view[own_slice.stop :].copy_(flat[own_slice.stop :])

            def came() -> None:
                self._missing -= 1
                if self._missing == 0:
                    try:
                        self._add_parts(view[own_slice], flat[own_slice])
                        nbytes = (own_slice.stop - own_slice.start) * item
                        hub.send_block(
                            self._group.peers,
                            self._key | LAST,
                            self._description,
                            block,
                            own_slice.start * item,
                            nbytes,
                        )
                    except Exception as error:  # raised by this operation's wait, not by the one that runs this
                        self._error = error

            for index, peer in enumerate(self._group.members):
                if index != self._group.index:
                    start, nbytes = self._bounds[index] * item, (self._bounds[index + 1] - self._bounds[index]) * item
                    headers += hub.send_block([peer], self._key, self._description, block, start, nbytes)
            # A message that has arrived already calls back at once, inside this loop.
            for peer in self._group.peers:
                hub.call_when_received(peer, self._key, came)
        return headers

    def _add_parts(self, total: Tensor, own_part: Tensor) -> None:
        """Sum this rank's part over all ranks.

        Args:
            total: the part in this rank's block; overwritten by the sum.
            own_part: this rank's values of the part; overwritten by the sum.
        """
        messages = [self._hub.links[peer].inbox[self._key] for peer in self._group.peers]
        for message in messages:
            check_message(self._hub, self._description, message)
        parts = [message.as_tensor(own_part.dtype) for message in messages]
        parts.insert(self._group.index, own_part)
        sum_parts(parts, total)
        own_part.copy_(total)

    def _complete(self) -> None:
        for peer in self._group.peers:  # wait for all before any is taken: _add_parts reads them from the inbox
            self._hub.peek_message(peer, self._key, self.describe_wait)
        summands = [self._hub.receive_message(peer, self._key, self.describe_wait) for peer in self._group.peers]
        if self._error is not None:
            raise self._error
        for index, peer in enumerate(self._group.members):
            if index == self._group.index:
                continue
            part = self._hub.receive_message(peer, self._key | LAST, self.describe_wait)
            self._wire[self._bounds[index] : self._bounds[index + 1]].copy_(part.as_tensor(self._wire.dtype))
            self._hub.release_messages(part)
        self._hub.release_messages(*summands)


class ChunkedSum(PendingSum):
    """A large sum of two ranks, chunk by chunk: each chunk is added while it is still in the cache.

    When a chunk of the peer arrives, a rank sends its next one, then adds the peer's, in whatever wait it is then:

        arrived    -           chunk 0     chunk 1     chunk 2     chunk 3     chunk 4
        sends      0 at [0]    1 at [1]    2 at [2]    3 at [3]    4 at [0]    5 at [1]    [i]: slots of its block
        adds                   0           1           2           3           4

    The peer sends its chunk i before it adds chunk i - 1, and after it has added chunk i - 2: once chunk i arrives, the
    slots of chunks up to i - 2 may be overwritten. (64 MB: 10 ms; with :class:`DirectSum`, which moves everything
    through main memory five times, 17 ms.) Arguments: as of :class:`PendingSum`.
    """

    __slots__ = ("_added", "_block", "_chunk", "_last", "_peer")

    def __init__(self, hub: MessageHub, group: RankGroup, tensor: Tensor) -> None:
        super().__init__(hub, group, tensor)
        self._peer = group.peers[0]
        self._chunk = CHUNK // tensor.element_size()
        self._added = 0
        self._last: Message | None = None

    def start_sum(self) -> int:
        # Only the first chunk is sent here; the other ones have headers of the same length.
        with self._hub.lock:
            self._block = self._hub.acquire_block(PLACES * CHUNK, 1)
            headers = self._send_chunk(0)
            self._hub.call_when_received(self._peer, self._key, self._add_chunk)
        return headers * -(-self._wire.numel() // self._chunk)

    def _send_chunk(self, number: int) -> int:
        part, start = self._chunk_of(number), number % PLACES * self._chunk
        self._block.view(part.dtype, part.numel(), start).copy_(part)
        offset = start * part.element_size()
        return self._hub.send_block(
            (self._peer,), self._key + number % 2, self._description, self._block, offset, part.nbytes
        )

    def _chunk_of(self, number: int) -> Tensor:
        return self._wire[number * self._chunk : (number + 1) * self._chunk]

    def _add_chunk(self) -> None:
        """Handle the peer's next chunk; an error is stored, to be raised by this operation's own wait."""
        number = self._added
        message = self._hub.links[self._peer].inbox.pop(self._key + number % 2)
        try:
            check_message(self._hub, self._description, message)
            is_last = (number + 1) * self._chunk >= self._wire.numel()
            # The next chunk first: the peer adds it while this rank adds the peer's.
            if not is_last:
                self._send_chunk(number + 1)
            part = self._chunk_of(number)
            part += message.as_tensor(part.dtype)
        except Exception as error:
            self._error = error
            return
        self._added += 1
        if is_last:
            self._last = message
        else:
            self._hub.call_when_received(self._peer, self._key + self._added % 2, self._add_chunk)

    def _complete(self) -> None:
        self._hub.wait_until(self._peer, lambda: self._last is not None or self._error is not None, self.describe_wait)
        if self._error is not None:
            raise self._error
        assert self._last is not None
        self._hub.release_messages(self._last)  # one answer for all chunks: they were in one block

    def describe_wait(self) -> str:
        return f"taking part in {format_description(self._description)} with rank {self._peer}"


def sum_parts(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum two or more parts in their order.

    Args:
        parts: tensors of one shape and dtype; not written to.
        total: overwritten by the sum; must not share memory with a part.
    """
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part


def sum_parts_in_place(earlier_parts: Sequence[Tensor], own_part: Tensor, later_parts: Sequence[Tensor]) -> None:
    """Sum parts in their order, in the memory of one of them: the same bits whichever one that is.

    Args:
        earlier_parts: parts before ``own_part`` in the order; not written to.
        own_part: this rank's part; overwritten by the sum.
        later_parts: parts behind ``own_part`` in the order; not written to.
    """
    if len(earlier_parts) == 1:
        torch.add(earlier_parts[0], own_part, out=own_part)
    elif earlier_parts:
        total = earlier_parts[0] + earlier_parts[1]
        for part in earlier_parts[2:]:
            total += part
        torch.add(total, own_part, out=own_part)
    for part in later_parts:
        own_part += part
