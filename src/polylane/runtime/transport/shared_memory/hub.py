"""Per-process event loop over the Unix sockets to the other local ranks, for all transports of the process.

States of a message from W to R, and of W's block with its values (only for more than INLINE bytes):

    state         at W                               at R                                           block of W
    ----------    -------------------------------    -------------------------------------------    -------------------
    posted        send_values, send_block called     -                                              in use, written
    queued        SocketLink's socket is full        -                                              in use
    sent          in the kernel                      in the kernel                                  in use
    arrived       -                                  in link.inbox by key; callback called          in use
    received      -                                  out of the inbox; values are being read        in use
    kept          -                                  from KEPT bytes: a tensor over the block       in use
    unanswered    -                                  read; in _unanswered until the next ANSWERS    in use
    answered      ANSWERS message has arrived        -                                              free after the last

The kernel orders the memory accesses of two workers: values are written before the message that names them is sent, and
read after it has arrived; a block is written again only after all its readers have answered.

There is no background thread: a thread that waits handles whatever arrives, so that waits may be in any order.

    waiting thread    what it does
    first             polls its link for SPIN_SECONDS, then sleeps in epoll; handles all messages that arrive
    others            sleep on _changed, and check their condition whenever the first one has woken up
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

import numpy as np
import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.shared_memory.blocks import SharedBlock, SharedBlocks, SharedFile
from polylane.runtime.transport.shared_memory.message import (
    HEADER,
    IN_BLOCK,
    INLINE,
    LONGEST,
    NO_BLOCK,
    PRESSED,
    WITHIN,
    Message,
    format_description,
    memory_of,
)
from polylane.runtime.transport.shared_memory.socket_link import Buffer, SocketLink

SPIN_SECONDS = 50e-6  # polling time before sleeping, if every worker has a core of its own
ANSWERS_HELD = 8  # number of small blocks that are answered in one message
ANSWERED_AT_ONCE = 256 << 10  # bytes of a block from which on it is answered at once, by itself
KEPT = 256 << 10  # bytes from which on a received tensor stays in the sender's block instead of being copied


# Returns what is waited for in words, as "receiving torch.float32 (3, 4)"; called only for an error.
DescribeWait = Callable[[], str]


class MessageHub:
    """Sends, receives and waits for messages of all other workers of this host; see the module.

    Args:
        rank: rank of this worker in its world.
        connections: a connected socket for every peer on this host, by rank.
        bound: bytes of blocks in use above which a send waits for readers.
        timeout: seconds after which a peer that is alive but does not answer counts as lost.
        spins: whether every worker of the host has a core of its own, so that waits may poll before they sleep.

    Attributes:
        rank: rank of this worker in its world.
        is_closed: whether the last transport has closed the connections.
        lock: guards all state of the hub; released while a thread sleeps in the kernel.
        links: socket link to every peer on this host, by rank.
    """

    def __init__(
        self, rank: int, connections: Mapping[int, socket.socket], bound: int, timeout: float, spins: bool
    ) -> None:
        self.rank = rank
        self.is_closed = False
        self.lock = threading.Lock()  # over all that follows; never held while a thread sleeps
        self._blocks = SharedBlocks(bound)
        self.links = {
            peer: SocketLink(peer, connection, self._blocks.release_block) for peer, connection in connections.items()
        }
        self._timeout, self._spin = timeout, SPIN_SECONDS if spins else 0.0
        self._buffer = bytearray(LONGEST)
        self._unanswered: deque[tuple[int, int]] = deque()  # (peer, block): read, but not answered yet
        self._answers_due = False  # send answers at the next chance: a peer may be waiting for the memory
        self._changed = threading.Condition(self.lock)
        self._is_polling = False  # a thread sleeps in epoll, and will handle all that arrives
        self._listening = 0  # number of threads that wait for _changed
        self._users, self._users_ever = 0, 0
        self._poll = select.epoll()
        self._by_descriptor = {link.socket.fileno(): link for link in self.links.values()}
        # Registered events by descriptor; EPOLLOUT only for links with a queue: sockets almost always have room.
        self._polled_events = dict.fromkeys(self._by_descriptor, select.EPOLLIN)
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        # Called by the last transport's close, or when the hub is freed because nobody closed them.
        sockets = [link.socket for link in self.links.values()]
        self._release = weakref.finalize(self, _close_all, self._poll, sockets, self._blocks)
        # A forked child must not keep the sockets open: peers would not notice that this process has died.
        os.register_at_fork(after_in_child=self._release)

    # ---------------------------------------------------------------------------------------------------- who uses it

    def add_user(self) -> int:
        """Register a transport, and return its number: the same at all ranks, which make them in the same order."""
        self._users += 1
        self._users_ever += 1
        return self._users_ever - 1

    def remove_user(self) -> None:
        """Unregister a transport: wait until queued messages are sent; the last transport closes the hub."""
        with self.lock:
            self._send_answers()
            self._handle_until(
                lambda: not any(link.has_queued for link in self.links.values()), None, lambda: "sending what is left"
            )
            self._users -= 1
            if self._users == 0:
                self.is_closed = True
                self._release()

    # ---------------------------------------------------------------------------------------------------------- sending

    def send_values(self, peers: Sequence[int], key: int, description: bytes, values: Tensor) -> int:
        """Send the values of a contiguous tensor to peers, and return the number of bytes of headers.

        The values are copied: they may be overwritten at once.

        Args:
            peers: ranks that receive the same values.
            key: key of the message, by which receivers match it.
            description: operation, dtype and shape, see :func:`.message.encode_description`.
            values: contiguous tensor on the CPU.

        Raises:
            PeerLost: a peer has closed its connection.
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
        """Return an own block, waiting if too much is in use; the caller has the lock."""
        own_block = self._blocks.acquire_block(nbytes, readers, fresh=False)
        if own_block is None:
            self._read_all()  # prefer a used block, whose pages are warm: its last answer may have arrived by now
            own_block = self._blocks.acquire_block(nbytes, readers)
        if own_block is None:
            blocks = list[SharedBlock]()

            def taken() -> bool:
                block = self._blocks.acquire_block(nbytes, readers)
                blocks.extend([block] if block is not None else [])
                return block is not None

            waiting = f"waiting for others to read what was sent, before {nbytes} bytes more can be"
            self._handle_until(taken, None, lambda: waiting)
            own_block = blocks[0]
        return own_block

    def send_inline(self, peers: Iterable[int], key: int, description: bytes, values: Buffer) -> int:
        """Send values inside a message to each peer; the caller has the lock. Returns bytes of headers."""
        head = HEADER.pack(key, WITHIN, len(description), *NO_BLOCK, len(values)) + description
        return self._push(peers, (head, values), description)

    def send_block(
        self, peers: Iterable[int], key: int, description: bytes, block: SharedBlock, offset: int, nbytes: int
    ) -> int:
        """Send each peer the position of its values, which are written in a block already.

        The caller has the lock. ``offset`` is in bytes from the begin of the block. Returns bytes of headers.
        """
        kind = IN_BLOCK | PRESSED if self._blocks.is_short else IN_BLOCK
        arena = block.arena
        head = HEADER.pack(key, kind, len(description), arena.number, block.number, block.offset + offset, nbytes)
        return self._push(peers, (head + description,), description, arena)

    def _push(
        self, peers: Iterable[int], parts: tuple[Buffer, ...], description: bytes, arena: SharedFile | None = None
    ) -> int:
        """Send a message, a header and what follows it, to each peer; return the bytes of headers."""
        headers = 0
        for peer in peers:
            link = self.links[peer]
            if arena is None or peer in arena.known_peers:
                link.send_message(parts)
            else:  # the arena's descriptor goes with the first message that refers to it
                link.send_message(parts, arena)
                arena.known_peers.add(peer)
            headers += len(parts[0])
            self._wake_for_room(link)
            if link.deaf is not None:
                raise PeerLost(peer, f"taking part in {format_description(description)}", link.deaf)
        return headers

    # -------------------------------------------------------------------------------------------------------- receiving

    def call_when_received(self, peer: int, key: int, call: Callable[[], None]) -> None:
        """Call a function once when a message has arrived, or now if it has; the lock is held for this and the call.

        The call runs in the thread that reads the message, so it must not wait.
        """
        link = self.links[peer]
        if key in link.inbox:
            call()
        else:
            link.expected[key] = call

    def receive_message(self, peer: int, key: int, describe_wait: DescribeWait) -> Message:
        """Wait for a message of a peer, and take it out of the inbox; ``describe_wait`` describes the wait in errors.

        Raises:
            PeerLost: the peer has closed its connection, or did not send in time.
        """
        link = self.links[peer]
        with self.lock:
            if self._answers_due:
                self._send_answers()
            message = link.inbox.pop(key, None)
            if message is None:
                self._wait_for(link, lambda: key in link.inbox, describe_wait)
                message = link.inbox.pop(key)
            return message

    def peek_message(self, peer: int, key: int, describe_wait: DescribeWait) -> Message:
        """Wait for a message, and leave it in the inbox; raises as :meth:`receive_message`."""
        link = self.links[peer]
        with self.lock:
            if key not in link.inbox:
                self._wait_for(link, lambda: key in link.inbox, describe_wait)
            return link.inbox[key]

    def wait_until(self, peer: int, ready: Callable[[], bool], describe_wait: DescribeWait) -> None:
        """Wait for a condition that a peer's messages bring about; raises as :meth:`receive_message`."""
        with self.lock:
            if not ready():
                self._wait_for(self.links[peer], ready, describe_wait)

    def _wait_for(self, link: SocketLink, ready: Callable[[], bool], describe_wait: DescribeWait) -> None:
        # Most messages arrive within microseconds, faster than a thread can fall asleep and be woken up.
        if not self._is_polling:
            end = time.perf_counter() + self._spin
            while True:
                while link.read_message(self._buffer):
                    if ready():
                        return
                if link.gone is not None or time.perf_counter() >= end:
                    break
                os.sched_yield()  # the peer may need this core: without, a round trip takes 70 us instead of 17
        self._handle_until(ready, link, describe_wait)

    def _handle_until(self, ready: Callable[[], bool], link: SocketLink | None, describe_wait: DescribeWait) -> None:
        """Handle messages until a condition holds, which the link's peer must bring about (None: any peer may)."""
        deadline = time.monotonic() + self._timeout
        while not ready():
            seconds_left = deadline - time.monotonic()
            # A condition that one peer must bring about fails with that peer; otherwise once all others are lost.
            gone = self._why_all_gone() if link is None else link.gone
            if gone is not None or seconds_left <= 0:
                peer = None if link is None else link.peer
                raise PeerLost(peer, describe_wait(), gone or f"no answer in {self._timeout:g} s")
            if self._is_polling:
                self._update_polling()  # epoll sleeps in another thread: send answers, and watch queues filled since
                self._listening += 1
                self._changed.wait(seconds_left)
                self._listening -= 1
            else:
                self._poll_sockets(seconds_left)

    def _why_all_gone(self) -> str | None:
        return None if any(link.gone is None for link in self.links.values()) else "all others have left"

    def _poll_sockets(self, seconds: float) -> None:
        """Sleep in epoll without the lock until something arrives, and handle it with the lock."""
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
        """Send due answers, and set the events for which epoll wakes up: input, and room for queued messages."""
        self._answer_if_due()
        for descriptor, link in self._by_descriptor.items():
            self._wake_for(descriptor, link)

    def _wake_for_room(self, link: SocketLink) -> None:
        """Make a thread that sleeps in epoll already wake up for room to send this link's queue."""
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
        """Handle all messages that have arrived, without waiting."""
        # Only one thread reads the sockets at a time: the one in epoll will do it.
        if not self._is_polling:
            for link in self.links.values():
                while link.read_message(self._buffer):
                    pass

    # ------------------------------------------------------------------------------------------------------ read blocks

    def tensor_of(self, message: Message, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return a message's values as a new tensor: over the sender's block, or a copy if that is cheaper."""
        if message.arena is None:
            return message.as_tensor(dtype).view(shape)
        if message.nbytes < KEPT or message.is_sender_short:
            copy = message.as_tensor(dtype).clone().view(shape)
            self.release_messages(message)
            return copy
        # A numpy array as the owner of the memory: a finalizer needs an object that all tensors over it keep alive.
        owner = np.frombuffer(message.arena.map, np.uint8, message.nbytes, message.offset)
        # The block is answered once the last tensor over this memory is freed.
        weakref.finalize(owner, _note_released, weakref.ref(self), message.peer, message.block).atexit = False
        return torch.from_numpy(owner).view(dtype).view(shape)

    def release_messages(self, *messages: Message) -> None:
        """Release the blocks of messages whose values have been read, to be answered soon."""
        owed = [message for message in messages if message.arena is not None]
        for message in owed:
            self._unanswered.append((message.peer, message.block))
            self._answers_due = self._answers_due or message.nbytes >= ANSWERED_AT_ONCE or message.is_sender_short
        if owed or self._answers_due:
            with self.lock:
                self._answer_if_due()

    def _answer_if_due(self) -> None:
        if self._answers_due or len(self._unanswered) >= ANSWERS_HELD:
            self._send_answers()

    def _send_answers(self) -> None:
        """Send each peer one message with the numbers of its blocks that were read here since the last one."""
        self._answers_due = False
        by_peer: dict[int, list[int]] = {}
        while self._unanswered:
            peer, block = self._unanswered.popleft()
            by_peer.setdefault(peer, []).append(block)
        for peer, blocks in by_peer.items():
            self.links[peer].send_answers(blocks)
            self._wake_for_room(self.links[peer])


def _note_released(hub: weakref.ref[MessageHub], peer: int, block: int) -> None:
    """Note that a kept tensor was freed; called by the garbage collector at any point, so it takes no lock."""
    if (alive := hub()) is not None:
        alive._unanswered.append((peer, block))
        alive._answers_due = True


def _close_all(poll: select.epoll, connections: Sequence[socket.socket], blocks: SharedBlocks) -> None:
    poll.close()
    for connection in connections:
        connection.close()
    blocks.close()
