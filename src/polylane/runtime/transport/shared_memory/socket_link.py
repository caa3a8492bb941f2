"""Socket link between two workers of one host: non-blocking sends with a queue, and an inbox of received messages."""

from __future__ import annotations

import array
import ctypes
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from polylane.runtime.transport.shared_memory.blocks import SharedFile, open_arena
from polylane.runtime.transport.shared_memory.message import (
    ANSWERS,
    HEADER,
    NO_BLOCK,
    PRESSED,
    WITHIN,
    Message,
)

Buffer = bytes | ctypes.Array[ctypes.c_char]

SOCKET_BYTES = 4 << 20  # send buffer of a socket in bytes; the system may allow less
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)
_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # descriptors that arrive are not for programs that the user starts


class SocketLink:
    """One worker's end of the connection to one peer.

    Args:
        peer: rank of the worker at the other end.
        connection: a connected socket that keeps message boundaries and order (SOCK_SEQPACKET).
        answered: called with the number of each own block that the peer has read.

    Attributes:
        peer: rank of the worker at the other end.
        socket: non-blocking socket of the connection.
        inbox: messages that have arrived and were not taken yet, by key.
        expected: callback for the arrival of a message, by its key.
        gone: why nothing more arrives from the peer, or None.
        deaf: why nothing more can be sent to the peer, or None.
    """

    __slots__ = ("_answered", "_arenas", "_queue", "_reset", "deaf", "expected", "gone", "inbox", "peer", "socket")

    def __init__(self, peer: int, connection: socket.socket, answered: Callable[[int], None]) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self.peer = peer
        self.socket = connection
        self.inbox: dict[int, Message] = {}
        self.expected: dict[int, Callable[[], None]] = {}
        self.gone: str | None = None
        self.deaf: str | None = None
        self._answered = answered
        self._queue: deque[tuple[bytes, SharedFile | None]] = deque()
        self._reset = False
        self._arenas: dict[int, SharedFile] = {}

    @property
    def has_queued(self) -> bool:
        """Whether messages wait for room in the socket."""
        return bool(self._queue)

    def send_message(self, parts: Sequence[Buffer], arena: SharedFile | None = None) -> None:
        """Send a message, or queue it behind others if the socket is full; never waits.

        Args:
            parts: buffers that make up the message, in order.
            arena: arena whose file descriptor goes with the message; None if the peer has it already.
        """
        # A queued message is joined, so copied: its buffers may be overwritten as soon as this returns.
        if self._queue:
            self._queue.append((b"".join(parts), arena))
            self.flush_queue()
        elif not self._try_send(parts, arena):
            self._queue.append((b"".join(parts), arena))

    def flush_queue(self) -> None:
        """Send queued messages in order, as many as there is room for."""
        while self._queue:
            message, arena = self._queue[0]
            if not self._try_send((message,), arena):
                return
            if self._queue:  # _try_send clears the queue if the peer is lost
                self._queue.popleft()

    def send_answers(self, blocks: Sequence[int]) -> None:
        """Send the peer the numbers of its blocks that have been read, up to 1024 in a message."""
        for start in range(0, len(blocks), 1024):
            part = blocks[start : start + 1024]
            self.send_message((HEADER.pack(0, ANSWERS, 0, *NO_BLOCK, len(part)), struct.pack(f"={len(part)}I", *part)))

    def _try_send(self, parts: Sequence[Buffer], arena: SharedFile | None) -> bool:
        """Send a message if there is room; return False if not. To a lost peer it is dropped, and True returned."""
        if self.deaf is not None:
            return True
        try:
            if arena is None:
                self.socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)
            else:
                file = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [arena.descriptor]))]
                self.socket.sendmsg(parts, file, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError) as error:
            self.deaf = f"its end of the connection is closed ({error.strerror})"
            self._queue.clear()
        return True

    def read_message(self, buffer: bytearray) -> bool:
        """Handle one message; return False if none has arrived."""
        if self.gone is not None:
            return False
        try:
            size, extra, _, _ = self.socket.recvmsg_into((buffer,), _DESCRIPTOR_SPACE, _FLAGS)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the peer closed with unread messages; what it sent can still be read
            self._reset = True
            return True
        if size == 0:
            self.gone = "its end of the connection is closed" + (", with messages unread" if self._reset else "")
            self.deaf = self.deaf or self.gone
            self._queue.clear()
            return False
        key, kind, length, arena, block, offset, nbytes = HEADER.unpack_from(buffer)
        if kind == ANSWERS:
            for answered in struct.unpack_from(f"={nbytes}I", buffer, HEADER.size):
                self._answered(answered)
            return True
        # A message with values: inline behind the description, or in a block of an arena that is mapped at first use.
        start = HEADER.size + length
        description = bytes(buffer[HEADER.size : start])
        if kind == WITHIN:
            message = Message(self.peer, description, nbytes, buffer[start:size])
        else:
            if arena not in self._arenas:
                self._arenas[arena] = open_arena(arena, struct.unpack("i", extra[0][2][:4])[0])
            message = Message(
                self.peer, description, nbytes, None, self._arenas[arena], block, offset, bool(kind & PRESSED)
            )
        self.inbox[key] = message
        if self.expected and (call := self.expected.pop(key, None)) is not None:
            call()
        return True
