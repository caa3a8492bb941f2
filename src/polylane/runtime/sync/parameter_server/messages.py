"""Channels between workers and parameter servers: messages of a short head and rows of numbers, first in, first out.

    worker sends      rows                              server answers     rows
    WEIGHTS           first weights, one replica's      ANSWER             none, once all have come
    GRADIENTS         gradients of a step, options      ANSWER             weights that changed since the last answer
    NOTHING           none: a step without samples      ANSWER             weights that changed since the last answer
    READ_WEIGHTS      none                              ANSWER             all weights that this worker holds
    READ_GRADIENTS    none                              ANSWER             gradients of the last update
    END               none                              nothing

A server that has ended with an error sends FAILED in place of its answers. Servers send each other SUM.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.protocol import PendingTransfer, Transport

Sizes = Sequence[tuple[int, torch.dtype]]

CPU = torch.device("cpu")  # where the rows of messages are, whatever device computes at either end

_NUMBERS = struct.Struct("<8q")


class MessageKind(IntEnum):
    """What a message is."""

    WEIGHTS = 0  # to a server: what it is to begin with
    GRADIENTS = 1  # to a server: of one step
    NOTHING = 2  # to a server: a step without samples
    READ_WEIGHTS = 3  # to a server: a question
    READ_GRADIENTS = 4  # to a server: a question
    END = 5  # to a server: this worker sends nothing more
    ANSWER = 6  # from a server
    SUM = 7  # between servers
    FAILED = 8  # from a server: it has ended


@dataclass(frozen=True)
class MessageHead:
    """What precedes the rows of a message.

    Attributes:
        kind: what the message asks for or gives.
        objective: number of the objective that is stepped or asked for.
        step: the worker's, from 0.
        version: updates that the server had made when the weights were read: those of the answer, or those that the
            gradients were computed with.
        updates: of the objective, that the server has made.
        staleness: updates between reading the weights and applying their gradient.
        objectives: in an answer, those whose weights follow, a bit for each.
        option_bytes: bytes of options of the optimizer that follow the rows.
        flags: for every parameter of the rows whether it has a value.
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
        """The head as bytes, with room for ``flags`` flags: both ends of a line know how many."""
        numbers = (
            self.objective,
            self.step,
            self.version,
            self.updates,
            self.staleness,
            self.objectives,
            self.option_bytes,
        )
        content = _NUMBERS.pack(int(self.kind), *numbers) + self.flags.ljust(flags, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> MessageHead:
        """The inverse."""
        content = tensor.numpy().tobytes()
        kind, objective, step, version, updates, staleness, objectives, extra = _NUMBERS.unpack_from(content)
        flags = content[_NUMBERS.size :]
        return cls(MessageKind(kind), objective, step, version, updates, staleness, objectives, extra, flags)


HEAD_BYTES = _NUMBERS.size

Message = tuple[MessageHead, list[Tensor]]


class Channel(Protocol):
    """One end of a line; one thread puts at a time, and one gets."""

    def put(self, head: MessageHead, rows: Sequence[Tensor] = ()) -> None:
        """Send; the rows must not be written to any more."""
        ...

    def get(self, sizes: Callable[[MessageHead], Sizes]) -> Message:
        """Wait for what comes next; ``sizes``: of the rows that follow such a head.

        Raises:
            PeerLost: the other end is gone, or a server has failed.
        """
        ...


class RemoteChannel:
    """One end of a line between two processes.

    Args:
        transport: with channels there and back; several threads use it for lines to several peers.
        lock: for it: its calls are short, only waits are long, and they are outside.
        peer: the rank at the other end.
        flags: how many flags every head on this line has room for.
        doing: what a wait is for, in words for errors.
    """

    def __init__(self, transport: Transport, lock: threading.Lock, peer: int, flags: int, doing: str) -> None:
        self._transport, self._lock, self._peer = transport, lock, peer
        self._flags, self._doing = flags, doing
        self._pending_sends: list[PendingTransfer] = []

    def put(self, head: MessageHead, rows: Sequence[Tensor] = ()) -> None:
        for pending in self._pending_sends:
            pending.wait()
        with self._lock:
            self._pending_sends = [
                self._transport.send(each, self._peer) for each in (head.to_tensor(self._flags), *rows) if each.numel()
            ]

    def get(self, sizes: Callable[[MessageHead], Sizes]) -> Message:
        head = MessageHead.of_tensor(self._receive_rows([(HEAD_BYTES + self._flags, torch.uint8)])[0])
        _raise_if_failed(head, self._peer, self._doing)
        return head, self._receive_rows(sizes(head))

    def _receive_rows(self, sizes: Sizes) -> list[Tensor]:
        with self._lock:
            pending = [self._transport.receive((numel,), dtype, self._peer) for numel, dtype in sizes]
        return [each.wait() for each in pending]


class LocalChannel:
    """One end of a line inside a process.

    Args:
        going, coming: what the ends share.
        rank: of the process that both ends are in, for errors.
        doing: what a wait is for, in words for errors.
    """

    def __init__(
        self, going: queue.SimpleQueue[Message], coming: queue.SimpleQueue[Message], rank: int, doing: str
    ) -> None:
        self._outbox, self._inbox, self._rank, self._doing = going, coming, rank, doing

    def put(self, head: MessageHead, rows: Sequence[Tensor] = ()) -> None:
        self._outbox.put((head, list(rows)))

    def get(self, sizes: Callable[[MessageHead], Sizes]) -> Message:
        head, rows = self._inbox.get()
        _raise_if_failed(head, self._rank, self._doing)
        return head, rows


def open_local_channel(rank: int, there: str, back: str) -> tuple[LocalChannel, LocalChannel]:
    """Both ends of a line inside a process; ``there`` and ``back``: what the one and the other wait for."""
    to, fro = queue.SimpleQueue[Message](), queue.SimpleQueue[Message]()
    return LocalChannel(to, fro, rank, there), LocalChannel(fro, to, rank, back)


def _raise_if_failed(head: MessageHead, peer: int, doing: str) -> None:
    if head.kind is MessageKind.FAILED:
        raise PeerLost(peer, doing, "a parameter server there has failed")
