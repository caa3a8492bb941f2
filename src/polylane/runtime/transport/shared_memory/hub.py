"""Per-process event loop over the Unix sockets to the other local ranks, for all transports of the process.

The states of a message from W to R, and of the block of W that holds its values where these are longer than INLINE:

    state      at W                                at R                                       block of W
    -------    --------------------------------    ---------------------------------------    --------------------
    posted     post, tell or show was called       -                                          in use, values written
    queued     Link has no room in its socket      -                                          in use
    sent       in the kernel                       in the kernel                              in use
    arrived    -                                   in link.inbox, by key; expect's call made  in use
    taken      -                                   taken out by take; values are read         in use
    kept       -                                   a large one is a tensor of its receiver    in use while that lives
    owed       -                                   read; in _owed until the next answer       in use
    answered   an ANSWERS message has come         -                                          free, after all readers

The kernel orders the memory of two workers: values are written before the message that names them is sent, and read
after it has arrived; a block is written again only after all its readers have answered.

Nothing runs in the background: a thread that waits handles whatever arrives, so that waits may come in any order.

    threads that wait    what they do
    the first            looks at its link for SPIN_SECONDS, then sleeps in the kernel; handles what arrives
    the others           sleep on _changed, and look again whenever the first has woken up
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.shared_memory.blocks import SharedBlock, SharedBlocks
from polylane.runtime.transport.shared_memory.message import (
    HEADER,
    IN_BLOCK,
    INLINE,
    NO_BLOCK,
    PRESSED,
    WITHIN,
    Message,
    format_description,
    memory_of,
)
from polylane.runtime.transport.shared_memory.socket_link import Buffer, SocketLink, allocate_read_buffer

SPIN_SECONDS = 50e-6  # to look for an answer before sleeping, where every worker has a core to itself
ANSWERS_HELD = 8  # small blocks that are answered for together
ANSWERED_AT_ONCE = 256 << 10  # bytes of a block from which on it is answered for by itself
KEPT = 256 << 10  # bytes from which on a received tensor stays where it came, instead of being copied


class Awaited(Protocol):
    """What somebody waits for, to be told if it does not come."""

    def describe_wait(self) -> str:
        """As ``"receiving torch.float32 (3, 4)"``."""
        ...


class MessageHub:
    """See the module.

    Args:
        rank: of this worker in its world.
        connections: a connected socket for every peer on this host, by rank.
        bound: bytes of blocks in use from which on a send waits for its readers.
        timeout: seconds after which a peer that lives but does not answer counts as lost.
        spins: whether every worker of the host has a core to itself, so that waits may look before they sleep.
    """

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], bound: int, timeout: float, spins: bool
    ) -> None:
        self.rank = rank
        self.is_closed = False
        self.lock = threading.Lock()  # over all that follows; never held in the kernel
        self._blocks = SharedBlocks(bound)
        self.links = {peer: SocketLink(peer, each, self._blocks.release_block) for peer, each in connections.items()}
        self._timeout, self._spin = timeout, SPIN_SECONDS if spins else 0.0
        self._buffer = allocate_read_buffer()
        self._unanswered: deque[tuple[int, int]] = deque()  # (peer, block): read, and not answered for yet
        self._answers_due = False  # an answer must go out at the next chance: a peer may wait for the memory
        self._changed = threading.Condition(self.lock)
        self._is_polling = False  # some thread is in the kernel, and handles what comes
        self._listening = 0  # threads that wait for _changed
        self._users, self._users_ever = 0, 0
        self._poll = select.epoll()
        self._by_descriptor = {link.socket.fileno(): link for link in self.links.values()}
        # What the kernel wakes this worker for, by descriptor: EPOLLOUT only while a queue is not empty.
        self._polled_events = dict.fromkeys(self._by_descriptor, select.EPOLLIN)
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        # With the last transport, or with the last that uses it in any way where nobody closes them.
        sockets = [link.socket for link in self.links.values()]
        self._release = weakref.finalize(self, _close_all, self._poll, sockets, self._blocks)
        # A process forked from this one must not hold its sockets: nobody would see that this one has died.
        os.register_at_fork(after_in_child=self._release)

    # ---------------------------------------------------------------------------------------------------- who uses it

    def add_user(self) -> int:
        """One more transport uses the hub; its number, the same at all ranks, which make them in the same order."""
        self._users += 1
        self._users_ever += 1
        return self._users_ever - 1

    def remove_user(self) -> None:
        """A transport is done: all that is queued goes out first, and the last transport closes the hub."""
        with self.lock:
            self._send_answers()
            self._handle_until(
                lambda: not any(link.has_queued for link in self.links.values()), None, "sending what is left"
            )
            self._users -= 1
            if self._users == 0:
                self.is_closed = True
                self._release()

    # --------------------------------------------------------------------------------------------------------- telling

    def send_values(self, peers: Sequence[int], key: int, description: bytes, values: Tensor) -> int:
        """Give the values of a contiguous tensor to peers; they may be overwritten at once. Returns bytes of headers.

        Raises:
            PeerLost: a peer is known to be gone.
        """
        with self.lock:
            if self._answers_due:
                self._send_answers()
            if values.nbytes <= INLINE:
                return self.send_inline(peers, key, description, memory_of(values))
            block = self.acquire_block(values.nbytes, len(peers))
            block.view(values.dtype, values.numel()).copy_(values.view(-1))
            return self.send_block(peers, key, description, block, 0, values.nbytes)

    def acquire_block(self, nbytes: int, readers: int) -> SharedBlock:
        """A block of this worker's own, under the lock; waits where too many are in use."""
        found = self._blocks.acquire_block(nbytes, readers, fresh=False)
        if found is None:
            self._read_all()  # an old block is warm: perhaps its last reader has answered by now
            found = self._blocks.acquire_block(nbytes, readers)
        if found is None:
            blocks = list[SharedBlock]()

            def taken() -> bool:
                block = self._blocks.acquire_block(nbytes, readers)
                blocks.extend([block] if block is not None else [])
                return block is not None

            self._handle_until(
                taken, None, f"waiting for others to read what was sent, before {nbytes} bytes more can be"
            )
            found = blocks[0]
        return found

    def send_inline(self, peers: Iterable[int], key: int, description: bytes, values: Buffer) -> int:
        """Send values inside a message to each peer, under the lock."""
        head = HEADER.pack(key, WITHIN, len(description), *NO_BLOCK, len(values)) + description
        headers = 0
        for peer in peers:
            link = self.links[peer]
            link.send_message((head, values))
            headers += len(head)
            self._after_push(link, description)
        return headers

    def send_block(
        self, peers: Iterable[int], key: int, description: bytes, block: SharedBlock, offset: int, nbytes: int
    ) -> int:
        """Tell each peer where in a block its values are, under the lock."""
        kind = IN_BLOCK | PRESSED if self._blocks.is_short else IN_BLOCK
        arena = block.arena
        head = HEADER.pack(key, kind, len(description), arena.number, block.number, block.offset + offset, nbytes)
        head += description
        headers = 0
        for peer in peers:
            link = self.links[peer]
            link.send_message((head,), None if peer in arena.known_peers else arena)
            arena.known_peers.add(peer)
            headers += len(head)
            self._after_push(link, description)
        return headers

    def _after_push(self, link: SocketLink, description: bytes) -> None:
        self._wake_for_room(link)
        if link.deaf is not None:
            raise PeerLost(link.peer, f"taking part in {format_description(description)}", link.deaf)

    # ----------------------------------------------------------------------------------------------------- being told

    def call_when_received(self, peer: int, key: int, call: Callable[[], None]) -> None:
        """Call once when a message has come, or now if it has: under the lock, both this and the call."""
        link = self.links[peer]
        if key in link.inbox:
            call()
        else:
            link.expected[key] = call

    def receive_message(self, peer: int, key: int, what: Awaited) -> Message:
        """Wait for a message and take it.

        Raises:
            PeerLost: the peer is gone, or did not answer in time.
        """
        link = self.links[peer]
        with self.lock:
            if self._answers_due:
                self._send_answers()
            message = link.inbox.pop(key, None)
            if message is None:
                self._wait_for(link, lambda: key in link.inbox, what)
                message = link.inbox.pop(key)
            return message

    def peek_message(self, peer: int, key: int, what: Awaited) -> Message:
        """Wait for a message and leave it; raises as :meth:`take` does."""
        link = self.links[peer]
        with self.lock:
            if key not in link.inbox:
                self._wait_for(link, lambda: key in link.inbox, what)
            return link.inbox[key]

    def wait_until(self, peer: int, ready: Callable[[], bool], what: Awaited) -> None:
        """Wait for what a peer's messages bring about; raises as :meth:`take` does."""
        with self.lock:
            if not ready():
                self._wait_for(self.links[peer], ready, what)

    def _wait_for(self, link: SocketLink, ready: Callable[[], bool], what: Awaited) -> None:
        # Most answers come within microseconds, before a thread could fall asleep and be woken again.
        if not self._is_polling:
            end = time.perf_counter() + self._spin
            while True:
                while link.read_message(self._buffer):
                    if ready():
                        return
                if link.gone is not None or time.perf_counter() >= end:
                    break
                os.sched_yield()  # the peer may be on this very core: without, a round takes 70 us instead of 17
        self._handle_until(ready, link, what)

    def _handle_until(self, ready: Callable[[], bool], link: SocketLink | None, what: Awaited | str) -> None:
        """Handle what comes until something is so, which a peer must bring about, or anybody."""
        deadline = time.monotonic() + self._timeout
        while not ready():
            left = deadline - time.monotonic()
            # What one peer must bring about fails with that peer; what anybody may, only once all others are gone.
            gone = self._why_all_gone() if link is None else link.gone
            if gone is not None or left <= 0:
                doing = what if isinstance(what, str) else what.describe_wait()
                raise PeerLost(None if link is None else link.peer, doing, gone or f"no answer in {self._timeout:g} s")
            if self._is_polling:
                self._update_polling()  # for who sleeps: what is owed, and what has been queued since
                self._listening += 1
                self._changed.wait(left)
                self._listening -= 1
            else:
                self._poll_sockets(left)

    def _why_all_gone(self) -> str | None:
        return None if any(link.gone is None for link in self.links.values()) else "all others have left"

    def _poll_sockets(self, seconds: float) -> None:
        """Give up the lock and the core until something comes, and handle that."""
        self._update_polling()
        self._is_polling = True
        self.lock.release()
        try:
            events = self._poll.poll(seconds)
        finally:
            self.lock.acquire()
            self._is_polling = False
            if self._listening:
                self._changed.notify_all()
        for descriptor, event in events:
            link = self._by_descriptor[descriptor]
            if event & select.EPOLLOUT:
                link.flush_queue()
            if event & ~select.EPOLLOUT:
                while link.read_message(self._buffer):
                    pass

    def _update_polling(self) -> None:
        """Have the kernel wake this worker for what there is to read, and for room where something waits for it."""
        self._answer_if_due()
        for descriptor, link in self._by_descriptor.items():
            self._wake_for(descriptor, link)

    def _wake_for_room(self, link: SocketLink) -> None:
        """Where another thread sleeps already, it is to send what there was no room for."""
        if link.has_queued and self._is_polling:
            self._wake_for(link.socket.fileno(), link)

    def _wake_for(self, descriptor: int, link: SocketLink) -> None:
        events = 0 if link.gone is not None else select.EPOLLIN | (select.EPOLLOUT if link.has_queued else 0)
        if events != self._polled_events[descriptor]:
            self._polled_events[descriptor] = events
            if events:
                self._poll.modify(descriptor, events)
            else:
                self._poll.unregister(descriptor)

    def _read_all(self) -> None:
        """Handle all that has come, without waiting."""
        if not self._is_polling:
            for link in self.links.values():
                while link.read_message(self._buffer):
                    pass

    # ---------------------------------------------------------------------------------------------------- what was read

    def tensor_of(self, message: Message, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A new tensor of a message's values: over the sender's block, or a copy where that costs less."""
        if message.arena is None:
            return message.as_tensor(dtype).view(shape)
        if message.nbytes < KEPT or message.is_sender_short:
            copy = message.as_tensor(dtype).clone().view(shape)
            self.release_messages(message)
            return copy
        held = np.frombuffer(message.arena.map, np.uint8, message.nbytes, message.offset)
        # Answered for once the last tensor over this memory is gone.
        weakref.finalize(held, _note_released, weakref.ref(self), message.peer, message.block).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def release_messages(self, *messages: Message) -> None:
        """The values of messages have been read: their blocks are their owners' again."""
        owed = [message for message in messages if message.arena is not None]
        for message in owed:
            self._unanswered.append((message.peer, message.block))
            self._answers_due = self._answers_due or message.nbytes >= ANSWERED_AT_ONCE or message.is_sender_short
        if owed or self._answers_due:
            with self.lock:
                self._answer_if_due()

    def note_released(self, peer: int, block: int) -> None:
        """A kept tensor is gone. Called from anywhere, in the middle of anything: it is only noted."""
        self._unanswered.append((peer, block))
        self._answers_due = True

    def _answer_if_due(self) -> None:
        if self._answers_due or len(self._unanswered) >= ANSWERS_HELD:
            self._send_answers()

    def _send_answers(self) -> None:
        """Send each peer the numbers of its blocks that were read here since the last answer, in one message."""
        self._answers_due = False
        by_peer: dict[int, list[int]] = {}
        while self._unanswered:
            peer, block = self._unanswered.popleft()
            by_peer.setdefault(peer, []).append(block)
        for peer, blocks in by_peer.items():
            self.links[peer].send_answers(blocks)
            self._wake_for_room(self.links[peer])


def _note_released(hub: weakref.ref[MessageHub], peer: int, block: int) -> None:
    if (alive := hub()) is not None:
        alive.note_released(peer, block)


def _close_all(poll: select.epoll, connections: Sequence[socket.socket], blocks: SharedBlocks) -> None:
    poll.close()
    for connection in connections:
        connection.close()
    blocks.close()
