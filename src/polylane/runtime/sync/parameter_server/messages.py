"""Parameter-server channels: FIFO messages of a fixed-size head and packed rows, within or between processes.

    worker sends      rows                              server answers     rows
    WEIGHTS           first weights, one replica's      ANSWER             none, once all have come
    GRADIENTS         gradients of a step, options      ANSWER             weights that changed since the last answer
    NOTHING           none: a step without samples      ANSWER             weights that changed since the last answer
    READ_WEIGHTS      none                              ANSWER             all of this worker's weights or shards
    READ_GRADIENTS    none                              ANSWER             gradients of the last update
    END               none                              nothing

A server that has ended with an error sends FAILED instead of its answers. Servers exchange SUM among themselves.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.protocol import PendingTransfer, Transport

Sizes = Sequence[tuple[int, torch.dtype]]

CPU = torch.device("cpu")  # device of the rows of messages, whatever device computes at either end

_NUMBERS = struct.Struct("<8q")


class MessageKind(IntEnum):
    """Kind of a message; the first six go to a server."""

    WEIGHTS = 0  # initial weights
    GRADIENTS = 1  # gradients of one step
    NOTHING = 2  # a step without samples
    READ_WEIGHTS = 3  # request for all weights
    READ_GRADIENTS = 4  # request for the gradients of the last update
    END = 5  # this worker sends nothing more
    ANSWER = 6  # from a server to a worker
    SUM = 7  # between servers
    FAILED = 8  # from a server: it has ended with an error


class MessageHead(NamedTuple):
    """Head of a message, which precedes its rows.

    Attributes:
        kind: what the message requests or carries.
        objective: number of the objective that is stepped or read.
        step: step of the worker, from 0.
        version: number of updates in the weights: those of the answer, or those that the gradients were computed with.
        updates: number of updates of the objective on the server.
        staleness: updates by others between reading the weights and applying their gradient.
        objectives: in an answer, bit mask of the objectives whose weights follow.
        option_bytes: bytes of optimizer options that follow the rows.
        flags: one byte for each parameter of the rows, 1 if it has a value.
    """

    kind: MessageKind
    objective: int = 0
    step: int = 0
    version: int = 0
    updates: int = 0
    staleness: int = 0
    objectives: int = 0
    option_bytes: int = 0
    flags: bytes = b""

    def to_tensor(self, flags: int) -> Tensor:
        """Return the head as uint8 vector, padded to ``flags`` flags: both ends of a channel know that number."""
        *numbers, own_flags = self
        content = _NUMBERS.pack(*numbers) + own_flags.ljust(flags, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> MessageHead:
        """Return the head that :meth:`to_tensor` made a vector of; the padding of the flags stays."""
        content = tensor.numpy().tobytes()
        kind, *numbers = _NUMBERS.unpack_from(content)
        return cls._make((MessageKind(kind), *numbers, content[_NUMBERS.size :]))


Message = tuple[MessageHead, list[Tensor]]


class RemoteChannel:
    """One end of a channel between two processes; at any time at most one thread puts and one gets.

    Args:
        transport: carries both directions; several threads share it for channels to several peers.
        lock: guards calls of the transport, which are short; waits are outside of it.
        peer: rank of the process at the other end.
        flags: number of flags for which every head on this channel has room.
        doing: what a wait is for, in words, for errors.
    """

    def __init__(self, transport: Transport, lock: threading.Lock, peer: int, flags: int, doing: str) -> None:
        self._transport, self._lock, self._peer = transport, lock, peer
        self._flags, self._doing = flags, doing
        self._pending_sends: list[PendingTransfer] = []

    def put(self, head: MessageHead, rows: Sequence[Tensor] = ()) -> None:
        """Send a message; its rows must not be written to any more."""
        # The transport keeps sent tensors alive until they are waited for: at most one message's rows are.
        for pending in self._pending_sends:
            pending.wait()
        self._pending_sends = self._send([head.to_tensor(self._flags), *rows])

    def put_last(self, head: MessageHead) -> None:
        """Send a message behind which there is none, without a wait for those before it.

        Their receiver may be waiting for somebody who learns by this very message that nothing will come.
        """
        self._pending_sends += self._send([head.to_tensor(self._flags)])

    def _send(self, tensors: Sequence[Tensor]) -> list[PendingTransfer]:
        with self._lock:
            return [self._transport.send(tensor, self._peer) for tensor in tensors if tensor.numel()]

    def get(self, sizes: Callable[[MessageHead], Sizes]) -> Message:
        """Wait for the next message.

        Args:
            sizes: maps a head to (number of elements, dtype) of each row that follows it.

        Raises:
            PeerLost: the other end has closed its connection, or a server has failed.
        """
        # The head first: it decides how many rows follow, and of which sizes.
        head = MessageHead.of_tensor(self._receive_rows([(_NUMBERS.size + self._flags, torch.uint8)])[0])
        _raise_if_failed(head, self._peer, self._doing)
        return head, self._receive_rows(sizes(head))

    def _receive_rows(self, sizes: Sizes) -> list[Tensor]:
        with self._lock:
            pending = [self._transport.receive((numel,), dtype, self._peer) for numel, dtype in sizes]
        return [transfer.wait() for transfer in pending]


class LocalChannel:
    """One end of a channel inside a process; calls are those of :class:`RemoteChannel`.

    Args:
        going: queue of messages to the other end.
        coming: queue of messages from the other end.
        rank: rank of the process that has both ends, for errors.
        doing: what a wait is for, in words, for errors.
    """

    def __init__(
        self, going: queue.SimpleQueue[Message], coming: queue.SimpleQueue[Message], rank: int, doing: str
    ) -> None:
        self._outbox, self._inbox, self._rank, self._doing = going, coming, rank, doing

    def put(self, head: MessageHead, rows: Sequence[Tensor] = ()) -> None:
        self._outbox.put((head, list(rows)))

    put_last = put  # nothing waits here

    def get(self, sizes: Callable[[MessageHead], Sizes]) -> Message:
        head, rows = self._inbox.get()
        _raise_if_failed(head, self._rank, self._doing)
        return head, rows


Channel = RemoteChannel | LocalChannel


def open_local_channel(rank: int, forward: str, back: str) -> tuple[LocalChannel, LocalChannel]:
    """Return both ends of a channel inside a process.

    Args:
        rank: rank of the process, for errors.
        forward: what the first end waits for, in words.
        back: what the second end waits for, in words.
    """
    to, fro = queue.SimpleQueue[Message](), queue.SimpleQueue[Message]()
    return LocalChannel(to, fro, rank, forward), LocalChannel(fro, to, rank, back)


def _raise_if_failed(head: MessageHead, peer: int, doing: str) -> None:
    if head.kind is MessageKind.FAILED:
        raise PeerLost(peer, doing, "a parameter server there has failed")
