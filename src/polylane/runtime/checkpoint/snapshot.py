"""Snapshot: copies of a worker's part of a checkpoint in memory that it shares with its writer process.

    the worker        snapshot | continues to train ...                 | polls whether it is done
    its writer                 | writes rank-00003.safetensors, syncs   |

A checkpoint costs the training the time to copy; the bytes are written to the disk meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polylane.checkpoint.manifest import Chunk, Manifest, format_manifest
from polylane.checkpoint.read_tensors import DTYPE_NAMES, view_piece
from polylane.checkpoint.regions import LocalPiece
from polylane.checkpoint.store import CheckpointStore
from polylane.errors import PolylaneError, describe_disk_error
from polylane.runtime.nameless_file import open_nameless_file
from polylane.runtime.progress.processes import read_state
from polylane.runtime.state.held_tensors import HeldTensor
from polylane.runtime.workers.python_process import start_module

_ALIGN = 64  # a cache line, and enough for a view of any element type
_CHUNK = 4096  # bytes of an order that a pipe takes without waiting, once it says that it is ready (Linux's PIPE_BUF)

LOOK_SECONDS = 0.25  # interval at which the writer's state is read while it is waited for
STOPPED_SECONDS = 5.0  # that a writer may be stopped, by a person or a debugger, before it is ended
KILL_SECONDS = 5.0  # wait for a writer that was killed: one that waits for its disk ends later, and by itself


@dataclass(frozen=True)
class ShardToWrite:
    """One rectangle that this worker writes.

    Attributes:
        held: the tensor that it is a part of, of real numbers.
        piece: the rectangle, and where it is in the worker's tensor.
    """

    held: HeldTensor
    piece: LocalPiece

    @property
    def key(self) -> str:
        """Name in the file: the tensor's, and the rectangle's place where that is not all of it."""
        rectangle = self.piece.rectangle
        if rectangle.shape == self.held.region.shape:
            return self.held.name
        extent = ",".join(f"{o}+{n}" for o, n in zip(rectangle.offsets, rectangle.shape, strict=True))
        return f"{self.held.name}[{extent}]"


@dataclass(frozen=True)
class WrittenShards:
    """What a writer has written: one file, in plain values that workers can send each other.

    Attributes:
        file: name of the file in the checkpoint's folder.
        size: number of bytes of the file.
        chunks: (name of the tensor, chunk) of each rectangle, as plain values.
        seconds: time to copy the rectangles and to write the file.
    """

    file: str
    size: int
    chunks: Sequence[tuple[str, Mapping[str, Any]]]
    seconds: float


class SnapshotWriter:
    """A worker's writer process, with the memory that both map; started at the first snapshot."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: int | None = None
        self._mapped: mmap.mmap | None = None
        self._size = 0
        self._order: tuple[str, list[ShardToWrite]] | None = None
        self._copy_seconds = 0.0
        self._is_committing = False
        self._unread = b""  # of the writer's answer
        self._stopped_since: float | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written."""
        return self._order is not None

    @property
    def is_committing(self) -> bool:
        """Whether a folder is being made a checkpoint."""
        return self._is_committing

    def start(self, folder: str, file: str, shards: Sequence[ShardToWrite]) -> None:
        """Copy the shards, and have the writer write them as a file.

        Raises:
            PolylaneError: the memory or the process cannot be had.
        """
        assert self._order is None
        began = time.perf_counter()
        places, at = list[tuple[int, int]](), 0
        for shard in shards:
            size = shard.piece.rectangle.volume * shard.held.local.element_size()
            places.append((at, size))
            at += size + -size % _ALIGN
        try:
            self._open(at)
            self._copy(shards, places)
            entries = [
                (s.key, DTYPE_NAMES[s.held.local.dtype], s.piece.rectangle.shape, *location)
                for s, location in zip(shards, places, strict=True)
            ]
            self._send({"path": os.path.join(folder, file), "bytes": at, "entries": entries})
        except KeyError as error:  # of DTYPE_NAMES: a quantized type, say
            raise PolylaneError(f"a tensor of {error.args[0]} has no place in a checkpoint") from None
        except OSError as error:
            self.close()  # the next snapshot starts another one
            raise PolylaneError(f"no writer of checkpoints can be had: {error.strerror or error}") from None
        self._order, self._copy_seconds = (file, list(shards)), time.perf_counter() - began

    def _open(self, size: int) -> None:
        """Start the writer, also where the one before was killed, and share memory of some size with it."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._memory = open_nameless_file("checkpoint")
            self._process = start_module(
                "polylane.checkpoint.writer",
                str(self._memory),
                str(os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[self._memory],
            )
        if size > self._size:
            assert self._memory is not None
            if self._mapped is not None:
                self._mapped.close()
            os.ftruncate(self._memory, size)
            # It only grows: the writer maps what an order says, and the next snapshot is about as large.
            self._mapped, self._size = mmap.mmap(self._memory, size), size

    def _copy(self, shards: Sequence[ShardToWrite], places: Sequence[tuple[int, int]]) -> None:
        if not self._size:
            return
        assert self._mapped is not None
        buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
        with torch.no_grad():
            for shard, (start, size) in zip(shards, places, strict=True):
                if size:
                    source = view_piece(shard.held.local, shard.piece)
                    target = buffer[start : start + size].view(source.dtype).view(source.shape)
                    target.copy_(source)
        del buffer  # a memory map cannot be closed, to be made anew in a larger size, while a tensor refers to it

    def start_commit(self, store: CheckpointStore, unfinished: str, manifest: Manifest) -> None:
        """Have the writer make an unfinished folder a checkpoint.

        Raises:
            PolylaneError: the writer is gone.
        """
        assert self._order is None
        order = {"commit": [str(store.root), unfinished, manifest.step, format_manifest(manifest), store.keep]}
        try:
            self._send(order)
        except OSError as error:
            self.close()  # the next snapshot starts another one
            raise PolylaneError(f"the writer of checkpoints is gone: {error.strerror or error}") from None
        self._is_committing = True

    def wait_committed(self, seconds: float | None = None) -> str | None:
        """Return the checkpoint's folder; None if it takes longer.

        Args:
            seconds: bound on the waiting; None: until it is complete.

        Raises:
            PolylaneError: it cannot be completed; the reason.
        """
        answer = self._read_answer(seconds, "the manifest")
        if answer is None:
            return None
        self._is_committing = False
        if "error" in answer:
            number, words, file = answer["error"]
            raise PolylaneError(
                f"{file or 'its manifest'} cannot be written: {describe_disk_error(OSError(number, words))}"
            )
        return str(answer["folder"])

    def _send(self, order: Mapping[str, Any]) -> None:
        """Give the writer an order; see :mod:`polylane.checkpoint.writer`.

        Raises:
            OSError: the writer is gone, or was ended since it was stopped.
        """
        assert self._process is not None and self._process.stdin is not None
        content = json.dumps(order).encode() + b"\n"
        # In chunks that never block: a stopped writer does not read, and a full pipe would stop the training as well.
        while content:
            if select.select([], [self._process.stdin], [], LOOK_SECONDS)[1]:
                content = content[os.write(self._process.stdin.fileno(), content[:_CHUNK]) :]
            elif self._is_stopped():
                raise TimeoutError(errno.ETIMEDOUT, "it was stopped")

    def _read_answer(self, seconds: float | None, label: str) -> dict[str, Any] | None:
        """Return the writer's answer; None if it takes longer.

        Without a bound on the seconds a writer at work is waited for: how long a disk takes nobody knows. One that is
        stopped is ended, and the watch over the workers names who waits for a disk that does not answer.

        Raises:
            PolylaneError: the writer has died, or was ended since it was stopped.
        """
        assert self._process is not None and self._process.stdout is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._unread:
            timeout = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
            if select.select([self._process.stdout], [], [], timeout)[0]:
                arrived = os.read(self._process.stdout.fileno(), 1 << 16)
                self._unread += arrived
                if not arrived:
                    self.close()
                    raise PolylaneError(f"{label}: the process that writes it has died")
            elif self._is_stopped():
                pid = self._process.pid
                self.close()
                raise PolylaneError(
                    f"{label}: the process that writes it ({pid}) was stopped for {STOPPED_SECONDS:g} s, and was ended"
                )
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _is_stopped(self) -> bool:
        """Return whether the writer has been stopped for too long, by the times at which this was called."""
        assert self._process is not None
        now = time.monotonic()
        if read_state(self._process.pid) not in ("T", "t"):
            self._stopped_since = None
            return False
        self._stopped_since = self._stopped_since or now
        return now - self._stopped_since > STOPPED_SECONDS

    def wait(self, seconds: float | None = None) -> WrittenShards | None:
        """Return what was written; None if that takes longer.

        Args:
            seconds: bound on the waiting; None: until it is written.

        Raises:
            PolylaneError: it cannot be written; the reason.
        """
        assert self._order is not None
        file, shards = self._order
        try:
            answer = self._read_answer(seconds, file)
        except PolylaneError:
            self._order = None
            raise
        if answer is None:
            return None
        self._order = None
        if "error" in answer:
            number, words, _ = answer["error"]
            raise PolylaneError(f"{file}: {describe_disk_error(OSError(number, words))}")
        chunks = [
            (s.held.name, _chunk_of(s, file, checksum).model_dump(mode="json"))
            for s, checksum in zip(shards, answer["checksums"], strict=True)
        ]
        return WrittenShards(file, answer["size"], chunks, self._copy_seconds + answer["seconds"])

    def close(self) -> None:
        """End the writer; what it is writing is left unfinished."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # closing flushes, and the reader may be gone
                    pipe.close()
            self._process.kill()  # also one that is stopped
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        if self._mapped is not None:
            self._mapped.close()
        if self._memory is not None:
            os.close(self._memory)
        self.__init__()  # type: ignore[misc]


def _chunk_of(shard: ShardToWrite, file: str, checksum: int) -> Chunk:
    rectangle = shard.piece.rectangle
    return Chunk(file=file, key=shard.key, offsets=rectangle.offsets, shape=rectangle.shape, checksum=checksum)
