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
from polylane.runtime.transport.blocks import Block, Blocks
from polylane.runtime.transport.link import Buffer, Link, buffer_for_reading
from polylane.runtime.transport.message import (
    HEADER,
    IN_BLOCK,
    INLINE,
    NO_BLOCK,
    PRESSED,
    WITHIN,
    Message,
    memory,
    told,
)

SPIN_SECONDS = 50e-6  # to look for an answer before sleeping, where every worker has a core to itself
ANSWERS_HELD = 8  # small blocks that are answered for together
ANSWERED_AT_ONCE = 256 << 10  # bytes of a block from which on it is answered for by itself
KEPT = 256 << 10  # bytes from which on a received tensor stays where it came, instead of being copied


class Doing(Protocol):
    """What somebody waits for, to be told if it does not come."""

    def doing(self) -> str:
        """As ``"receiving torch.float32 (3, 4)"``."""
        ...


class Hub:
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
        self.closed = False
        self.lock = threading.Lock()  # over all that follows; never held in the kernel
        self._blocks = Blocks(bound)
        self.links = {peer: Link(peer, each, self._blocks.answered) for peer, each in connections.items()}
        self._timeout, self._spin = timeout, SPIN_SECONDS if spins else 0.0
        self._buffer = buffer_for_reading()
        self._owed: deque[tuple[int, int]] = deque()  # (peer, block): read, and not answered for yet
        self._due = False  # an answer must go out at the next chance: a peer may wait for the memory
        self._changed = threading.Condition(self.lock)
        self._asleep = False  # some thread is in the kernel, and handles what comes
        self._listening = 0  # threads that wait for _changed
        self._users, self._numbered = 0, 0
        self._poll = select.epoll()
        self._by_descriptor = {link.socket.fileno(): link for link in self.links.values()}
        # What the kernel wakes this worker for, by descriptor: EPOLLOUT only while a queue is not empty.
        self._watched = dict.fromkeys(self._by_descriptor, select.EPOLLIN)
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)
        # With the last transport, or with the last that uses it in any way where nobody closes them.
        sockets = [link.socket for link in self.links.values()]
        self._release = weakref.finalize(self, _let_go, self._poll, sockets, self._blocks)
        # A process forked from this one must not hold its sockets: nobody would see that this one has died.
        os.register_at_fork(after_in_child=self._release)

    # ---------------------------------------------------------------------------------------------------- who uses it

    def join(self) -> int:
        """One more transport uses the hub; its number, the same at all ranks, which make them in the same order."""
        self._users += 1
        self._numbered += 1
        return self._numbered - 1

    def leave(self) -> None:
        """A transport is done: all that is queued goes out first, and the last transport closes the hub."""
        with self.lock:
            self._answer()
            self._until(lambda: not any(link.behind for link in self.links.values()), None, "sending what is left")
            self._users -= 1
            if self._users == 0:
                self.closed = True
                self._release()

    # --------------------------------------------------------------------------------------------------------- telling

    def post(self, peers: Sequence[int], key: int, description: bytes, values: Tensor) -> int:
        """Give the values of a contiguous tensor to peers; they may be overwritten at once. Returns bytes of headers.

        Raises:
            PeerLost: a peer is known to be gone.
        """
        with self.lock:
            if self._due:
                self._answer()
            if values.nbytes <= INLINE:
                return self.tell(peers, key, description, memory(values))
            block = self.block(values.nbytes, len(peers))
            block.view(values.dtype, values.numel()).copy_(values.view(-1))
            return self.show(peers, key, description, block, 0, values.nbytes)

    def block(self, nbytes: int, readers: int) -> Block:
        """A block of this worker's own, under the lock; waits where too many are in use."""
        found = self._blocks.take(nbytes, readers, fresh=False)
        if found is None:
            self._read_all()  # an old block is warm: perhaps its last reader has answered by now
            found = self._blocks.take(nbytes, readers)
        if found is None:
            blocks = list[Block]()

            def taken() -> bool:
                block = self._blocks.take(nbytes, readers)
                blocks.extend([block] if block is not None else [])
                return block is not None

            self._until(taken, None, f"waiting for others to read what was sent, before {nbytes} bytes more can be")
            found = blocks[0]
        return found

    def tell(self, peers: Iterable[int], key: int, description: bytes, values: Buffer) -> int:
        """Send values inside a message to each peer, under the lock."""
        head = HEADER.pack(key, WITHIN, len(description), *NO_BLOCK, len(values)) + description
        headers = 0
        for peer in peers:
            link = self.links[peer]
            link.push((head, values))
            headers += len(head)
            self._pushed(link, description)
        return headers

    def show(self, peers: Iterable[int], key: int, description: bytes, block: Block, offset: int, nbytes: int) -> int:
        """Tell each peer where in a block its values are, under the lock."""
        kind = IN_BLOCK | PRESSED if self._blocks.pressed else IN_BLOCK
        arena = block.arena
        head = HEADER.pack(key, kind, len(description), arena.number, block.number, block.offset + offset, nbytes)
        head += description
        headers = 0
        for peer in peers:
            link = self.links[peer]
            link.push((head,), None if peer in arena.known else arena)
            arena.known.add(peer)
            headers += len(head)
            self._pushed(link, description)
        return headers

    def _pushed(self, link: Link, description: bytes) -> None:
        self._wake_for_room(link)
        if link.deaf is not None:
            raise PeerLost(link.peer, f"taking part in {told(description)}", link.deaf)

    # ----------------------------------------------------------------------------------------------------- being told

    def expect(self, peer: int, key: int, call: Callable[[], None]) -> None:
        """Call once when a message has come, or now if it has: under the lock, both this and the call."""
        link = self.links[peer]
        if key in link.inbox:
            call()
        else:
            link.expected[key] = call

    def take(self, peer: int, key: int, what: Doing) -> Message:
        """Wait for a message and take it.

        Raises:
            PeerLost: the peer is gone, or did not answer in time.
        """
        link = self.links[peer]
        with self.lock:
            if self._due:
                self._answer()
            message = link.inbox.pop(key, None)
            if message is None:
                self._await(link, lambda: key in link.inbox, what)
                message = link.inbox.pop(key)
            return message

    def see(self, peer: int, key: int, what: Doing) -> Message:
        """Wait for a message and leave it; raises as :meth:`take` does."""
        link = self.links[peer]
        with self.lock:
            if key not in link.inbox:
                self._await(link, lambda: key in link.inbox, what)
            return link.inbox[key]

    def wait(self, peer: int, ready: Callable[[], bool], what: Doing) -> None:
        """Wait for what a peer's messages bring about; raises as :meth:`take` does."""
        with self.lock:
            if not ready():
                self._await(self.links[peer], ready, what)

    def _await(self, link: Link, ready: Callable[[], bool], what: Doing) -> None:
        # Most answers come within microseconds, before a thread could fall asleep and be woken again.
        if not self._asleep:
            end = time.perf_counter() + self._spin
            while True:
                while link.read(self._buffer):
                    if ready():
                        return
                if link.gone is not None or time.perf_counter() >= end:
                    break
                os.sched_yield()  # the peer may be on this very core: without, a round takes 70 us instead of 17
        self._until(ready, link, what)

    def _until(self, ready: Callable[[], bool], link: Link | None, what: Doing | str) -> None:
        """Handle what comes until something is so, which a peer must bring about, or anybody."""
        deadline = time.monotonic() + self._timeout
        while not ready():
            left = deadline - time.monotonic()
            # What one peer must bring about fails with that peer; what anybody may, only once all others are gone.
            gone = self._left() if link is None else link.gone
            if gone is not None or left <= 0:
                doing = what if isinstance(what, str) else what.doing()
                raise PeerLost(None if link is None else link.peer, doing, gone or f"no answer in {self._timeout:g} s")
            if self._asleep:
                self._watch()  # for who sleeps: what is owed, and what has been queued since
                self._listening += 1
                self._changed.wait(left)
                self._listening -= 1
            else:
                self._sleep(left)

    def _left(self) -> str | None:
        return None if any(link.gone is None for link in self.links.values()) else "all others have left"

    def _sleep(self, seconds: float) -> None:
        """Give up the lock and the core until something comes, and handle that."""
        self._watch()
        self._asleep = True
        self.lock.release()
        try:
            events = self._poll.poll(seconds)
        finally:
            self.lock.acquire()
            self._asleep = False
            if self._listening:
                self._changed.notify_all()
        for descriptor, event in events:
            link = self._by_descriptor[descriptor]
            if event & select.EPOLLOUT:
                link.flush()
            if event & ~select.EPOLLOUT:
                while link.read(self._buffer):
                    pass

    def _watch(self) -> None:
        """Have the kernel wake this worker for what there is to read, and for room where something waits for it."""
        self._pay()
        for descriptor, link in self._by_descriptor.items():
            self._wake_for(descriptor, link)

    def _wake_for_room(self, link: Link) -> None:
        """Where another thread sleeps already, it is to send what there was no room for."""
        if link.behind and self._asleep:
            self._wake_for(link.socket.fileno(), link)

    def _wake_for(self, descriptor: int, link: Link) -> None:
        events = 0 if link.gone is not None else select.EPOLLIN | (select.EPOLLOUT if link.behind else 0)
        if events != self._watched[descriptor]:
            self._watched[descriptor] = events
            if events:
                self._poll.modify(descriptor, events)
            else:
                self._poll.unregister(descriptor)

    def _read_all(self) -> None:
        """Handle all that has come, without waiting."""
        if not self._asleep:
            for link in self.links.values():
                while link.read(self._buffer):
                    pass

    # ---------------------------------------------------------------------------------------------------- what was read

    def kept(self, message: Message, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A new tensor of a message's values: over the sender's block, or a copy where that costs less."""
        if message.arena is None:
            return message.tensor(dtype).view(shape)
        if message.nbytes < KEPT or message.pressed:
            copy = message.tensor(dtype).clone().view(shape)
            self.answer(message)
            return copy
        held = np.frombuffer(message.arena.map, np.uint8, message.nbytes, message.offset)
        # Answered for once the last tensor over this memory is gone.
        weakref.finalize(held, _note, weakref.ref(self), message.peer, message.block).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def answer(self, *messages: Message) -> None:
        """The values of messages have been read: their blocks are their owners' again."""
        owed = [message for message in messages if message.arena is not None]
        for message in owed:
            self._owed.append((message.peer, message.block))
            self._due = self._due or message.nbytes >= ANSWERED_AT_ONCE or message.pressed
        if owed or self._due:
            with self.lock:
                self._pay()

    def note(self, peer: int, block: int) -> None:
        """A kept tensor is gone. Called from anywhere, in the middle of anything: it is only noted."""
        self._owed.append((peer, block))
        self._due = True

    def _pay(self) -> None:
        if self._due or len(self._owed) >= ANSWERS_HELD:
            self._answer()

    def _answer(self) -> None:
        """Send each peer the numbers of its blocks that were read here since the last answer, in one message."""
        self._due = False
        by_peer: dict[int, list[int]] = {}
        while self._owed:
            peer, block = self._owed.popleft()
            by_peer.setdefault(peer, []).append(block)
        for peer, blocks in by_peer.items():
            self.links[peer].answer(blocks)
            self._wake_for_room(self.links[peer])


def _note(hub: weakref.ref[Hub], peer: int, block: int) -> None:
    if (alive := hub()) is not None:
        alive.note(peer, block)


def _let_go(poll: select.epoll, connections: Sequence[socket.socket], blocks: Blocks) -> None:
    poll.close()
    for connection in connections:
        connection.close()
    blocks.close()
