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
from polylane.runtime.transport.protocol import Pending, Transport

Sizes = Sequence[tuple[int, torch.dtype]]

CPU = torch.device("cpu")  # where the rows of messages are, whatever device computes at either end

_NUMBERS = struct.Struct("<8q")


class Kind(IntEnum):
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
class Head:
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
        extra: bytes of options of the optimizer that follow the rows.
        flags: for every parameter of the rows whether it has a value.
    """

    kind: Kind
    objective: int = 0
    step: int = 0
    version: int = 0
    updates: int = 0
    staleness: int = 0
    objectives: int = 0
    extra: int = 0
    flags: bytes = b""

    def to_tensor(self, flags: int) -> Tensor:
        """The head as bytes, with room for ``flags`` flags: both ends of a line know how many."""
        numbers = (self.objective, self.step, self.version, self.updates, self.staleness, self.objectives, self.extra)
        content = _NUMBERS.pack(int(self.kind), *numbers) + self.flags.ljust(flags, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Head:
        """The inverse."""
        content = tensor.numpy().tobytes()
        kind, objective, step, version, updates, staleness, objectives, extra = _NUMBERS.unpack_from(content)
        flags = content[_NUMBERS.size :]
        return cls(Kind(kind), objective, step, version, updates, staleness, objectives, extra, flags)


HEAD_BYTES = _NUMBERS.size

Message = tuple[Head, list[Tensor]]


class Line(Protocol):
    """One end of a line; one thread puts at a time, and one gets."""

    def put(self, head: Head, rows: Sequence[Tensor] = ()) -> None:
        """Send; the rows must not be written to any more."""
        ...

    def get(self, sizes: Callable[[Head], Sizes]) -> Message:
        """Wait for what comes next; ``sizes``: of the rows that follow such a head.

        Raises:
            PeerLost: the other end is gone, or a server has failed.
        """
        ...


class Wire:
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
        self._sent: list[Pending] = []

    def put(self, head: Head, rows: Sequence[Tensor] = ()) -> None:
        for pending in self._sent:
            pending.wait()
        with self._lock:
            self._sent = [
                self._transport.send(each, self._peer) for each in (head.to_tensor(self._flags), *rows) if each.numel()
            ]

    def get(self, sizes: Callable[[Head], Sizes]) -> Message:
        head = Head.of_tensor(self._received([(HEAD_BYTES + self._flags, torch.uint8)])[0])
        _refuse_failed(head, self._peer, self._doing)
        return head, self._received(sizes(head))

    def _received(self, sizes: Sizes) -> list[Tensor]:
        with self._lock:
            pending = [self._transport.receive((numel,), dtype, self._peer) for numel, dtype in sizes]
        return [each.wait() for each in pending]


class Memory:
    """One end of a line inside a process.

    Args:
        going, coming: what the ends share.
        rank: of the process that both ends are in, for errors.
        doing: what a wait is for, in words for errors.
    """

    def __init__(
        self, going: queue.SimpleQueue[Message], coming: queue.SimpleQueue[Message], rank: int, doing: str
    ) -> None:
        self._going, self._coming, self._rank, self._doing = going, coming, rank, doing

    def put(self, head: Head, rows: Sequence[Tensor] = ()) -> None:
        self._going.put((head, list(rows)))

    def get(self, sizes: Callable[[Head], Sizes]) -> Message:
        head, rows = self._coming.get()
        _refuse_failed(head, self._rank, self._doing)
        return head, rows


def inside(rank: int, there: str, back: str) -> tuple[Memory, Memory]:
    """Both ends of a line inside a process; ``there`` and ``back``: what the one and the other wait for."""
    to, fro = queue.SimpleQueue[Message](), queue.SimpleQueue[Message]()
    return Memory(to, fro, rank, there), Memory(fro, to, rank, back)


def _refuse_failed(head: Head, peer: int, doing: str) -> None:
    if head.kind is Kind.FAILED:
        raise PeerLost(peer, doing, "a parameter server there has failed")
