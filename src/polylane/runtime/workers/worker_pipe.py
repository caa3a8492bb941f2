"""Worker pipe: one worker's reports as they arrive, taken when they are whole: nobody waits for the rest of one.

A worker may be stopped, or frozen by the system, in the midst of a report: whoever reads it must go on to look at the
others, and to say what has happened. `multiprocessing.Connection` waits for as many bytes as a message says.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

from polylane.runtime.plain_data.serialization import decode
from polylane.runtime.workers.failure import Failure

T = TypeVar("T")
Listener = Callable[[int, dict[str, Any]], None]  # called with a worker's rank and the content of its message

MESSAGE, RESULT, FAILURE = b"m", b"r", b"f"  # kinds of reports

_READ_BYTES = 1 << 20  # most bytes that are read at once
_HEADER = struct.Struct("!cQ")  # of a report: its kind, and the bytes of its content


def write_report(pipe: Connection, kind: bytes, content: bytes | memoryview) -> None:
    """Write a whole report, which may be larger than what the pipe holds.

    Args:
        pipe: write end of a worker's pipe.
        kind: one of :data:`MESSAGE`, :data:`RESULT` and :data:`FAILURE`.
        content: message, result or failure, encoded.
    """
    for part in (_HEADER.pack(kind, len(content)), content):
        unwritten = memoryview(part)
        while unwritten:
            unwritten = unwritten[os.write(pipe.fileno(), unwritten) :]


@dataclass
class WorkerPipe(Generic[T]):
    """The pipe from one worker to the parent, and the reports that have arrived.

    Attributes:
        rank: rank of the worker at the other end.
        reports: pipe or socket that carries the worker's reports.
        result: the worker's result, as a list of one element; empty until it has arrived.
        failure: the worker's failure, once reported or seen by its exit; else None.
    """

    rank: int
    reports: Connection
    result: list[T] = field(default_factory=list)
    failure: Failure | None = None
    _unread: bytearray = field(default_factory=bytearray, repr=False)

    def read_reports(self, on_message: Listener | None) -> None:
        """Read what has arrived, at least a byte, and take the whole reports in it; close the pipe at its end."""
        try:
            arrived = os.read(self.reports.fileno(), _READ_BYTES)
        except OSError:
            arrived = b""
        if not arrived:  # also inside the report of a dead worker
            self.reports.close()
            return
        self._unread += arrived
        for kind, content in self._take_reports():
            self._take(kind, content, on_message)

    def _take_reports(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind and the content of each report that is whole, and forget its bytes."""
        while len(self._unread) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread)
            end = _HEADER.size + length
            if len(self._unread) < end:
                return
            content = bytes(self._unread[_HEADER.size : end])
            del self._unread[:end]
            yield kind, content

    def _take(self, kind: bytes, content: bytes, on_message: Listener | None) -> None:
        if kind == MESSAGE and on_message is not None:
            on_message(self.rank, decode(content))
        elif kind == RESULT:
            self.result.append(torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))
        elif kind == FAILURE:
            self.failure = pickle.loads(content)

    @property
    def has_ended(self) -> bool:
        """Whether the worker's result or failure has arrived."""
        return bool(self.result) or self.failure is not None
