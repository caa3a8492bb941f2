"""State board: all workers put their parts of a training's state into one memory, where a process of rank 0 reads it.

    rank 0        creates the memory | its rectangles -+
    rank 1        opens it           | its rectangles -+-- exchange: all parts are there --> rank 0: BoardRecord
    another host  cannot open it     | sends its rectangles along with the exchange

Each rectangle is written by one of the workers that hold it, as in a checkpoint (:mod:`.save`), but nothing is written
to a disk. Who writes what is agreed on once, and again when the state has other tensors than before.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polylane.checkpoint.manifest import ITEM_BYTES
from polylane.checkpoint.read_tensors import DTYPES, view_piece
from polylane.checkpoint.regions import Rectangle
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.save import Gather, WritableRectangle, assign_rectangles, cut_shards
from polylane.runtime.checkpoint.snapshot import ShardToWrite
from polylane.runtime.plain_data.serialization import encode, serializable
from polylane.runtime.state.held_tensors import Region, WorkerState

_ALIGN = 64  # a cache line, and enough for a view of any element type
# At the head of the memory: on another host the process id is another process's, and its file has other bytes.
_NONCE_BYTES = 16


@serializable
@dataclass(frozen=True)
class BoardTensor:
    """Where a whole tensor is on the board.

    Attributes:
        dtype: the element type, as safetensors names it.
        shape: shape of the whole tensor, with a last dimension of 2 for complex numbers.
        is_complex: whether its elements are the parts of complex numbers.
        chunks: (byte offset on the board, offsets, lengths) of each of its rectangles.
    """

    dtype: str
    shape: tuple[int, ...]
    is_complex: bool
    chunks: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@serializable
@dataclass(frozen=True)
class BoardRecord:
    """A state on the board.

    Attributes:
        tensors: where each tensor is, by its global name; empty on other ranks than 0.
        plain: every worker's plain state, merged.
    """

    tensors: Mapping[str, BoardTensor]
    plain: Mapping[str, Any] = field(repr=False)


class StateRefused(PolylaneError):
    """A worker's state cannot be collected, or there is no memory for it; raised on all workers."""


class StateBoard:
    """One worker's access to the memory; all processes of a training make and use it together.

    Args:
        rank: rank of this process.
        gather: returns every process's plain value, by rank; a collective of all.
        memory: on rank 0, the descriptor of an empty file in memory, which processes that it forked have as well.
    """

    def __init__(self, rank: int, gather: Gather, memory: int = -1) -> None:
        self._rank, self._gather = rank, gather
        self._digests: list[str] = []
        self._mine: list[tuple[int, int]] = []  # (index of the shard, byte offset) of what this worker writes
        self._tensors: dict[str, BoardTensor] = {}
        self._places: list[list[int]] = []  # by rank, the byte offsets of what it writes
        self._mapped: mmap.mmap | None = None
        self._size = 0
        self._memory, nonce = memory, secrets.token_bytes(_NONCE_BYTES)
        if rank == 0:
            os.pwrite(self._memory, nonce, 0)
        process, descriptor, expected = gather((os.getpid(), self._memory, nonce.hex()))[0]
        if rank:
            self._memory = _open_of_process(process, descriptor, bytes.fromhex(expected))

    def record(self, collect: Callable[[], WorkerState]) -> BoardRecord:
        """Put the state on the board, in the place of the one before; a collective of all processes.

        Args:
            collect: returns what this worker holds.

        Raises:
            StateRefused: on all workers, if the state of one of them cannot be collected.
        """
        state, refusal = WorkerState(), ""
        self._gather(None)  # all are here: a server that is a process of its own has made the updates of all steps
        try:
            state = collect()
        except PolylaneError as refused:  # raised below on all workers, which wait in the exchange
            refusal = str(refused)
        shards, rectangles = cut_shards(state)
        digest = hashlib.sha256(encode([tuple(rectangle) for rectangle in rectangles])).hexdigest()
        is_known = len(self._digests) > self._rank and self._digests[self._rank] == digest
        sent = self._write(shards) if is_known else None
        reports = self._gather((refusal, digest, state.plain, sent))
        if refusal := next((report[0] for report in reports if report[0]), ""):
            raise StateRefused(refusal)
        digests = [report[1] for report in reports]
        if digests != self._digests:
            self._lay_out(rectangles)
            self._digests = digests
            # The second exchange tells that all parts are there.
            all_sent = self._gather(self._write(shards))
        else:
            all_sent = [report[3] for report in reports]
        if self._rank == 0:
            self._write_received(all_sent)
        plain: dict[str, Any] = {}
        for report in reversed(reports):
            plain |= report[2]
        return BoardRecord(self._tensors if self._rank == 0 else {}, plain)

    def _lay_out(self, rectangles: Sequence[WritableRectangle]) -> None:
        """Agree on who writes which rectangle, and where; a collective."""
        tables = self._gather([tuple(rectangle) for rectangle in rectangles])
        rectangles_by_rank = [[WritableRectangle(*row) for row in ranks] for ranks in tables]
        error, end, chunks = "", _ALIGN, dict[WritableRectangle, int]()
        self._places = []
        for rank, chosen in enumerate(assign_rectangles(rectangles_by_rank)):
            self._places.append([])
            for index in chosen:
                rectangle = rectangles_by_rank[rank][index]
                chunks[rectangle] = end
                self._places[-1].append(end)
                size = math.prod(rectangle.lengths) * ITEM_BYTES[rectangle.dtype]
                end += size + -size % _ALIGN
            if rank == self._rank:
                self._mine = list(zip(chosen, self._places[-1], strict=True))
        if self._rank == 0:
            self._tensors = {}
            for chunk, start in chunks.items():
                old_tensor = self._tensors.get(chunk.name)
                places = (*(() if old_tensor is None else old_tensor.chunks), (start, chunk.offsets, chunk.lengths))
                self._tensors[chunk.name] = BoardTensor(chunk.dtype, chunk.shape, chunk.is_complex, places)
            try:
                if end > os.fstat(self._memory).st_size:
                    os.ftruncate(self._memory, end)
            except OSError as refused:  # a limit on the size of files holds for memory as well
                error = f"{end >> 20:,} MiB of shared memory cannot be had ({refused.strerror})"
        self._size = end
        if self._mapped is not None:
            self._mapped = None  # views of it may be alive: freed with them
        if error := self._gather(error)[0]:  # else the memory has its size now
            raise StateRefused(error)

    def _write(self, shards: Sequence[ShardToWrite]) -> list[Tensor] | None:
        """Write this worker's rectangles; return them where this worker cannot open the memory."""
        sources = [(view_piece(shards[i].held.local, shards[i].piece), start) for i, start in self._mine]
        if self._memory < 0:
            return [source.detach().cpu().contiguous() for source, _ in sources]
        with torch.no_grad():
            for source, start in sources:
                if source.numel():
                    self._view(start, source.dtype, source.shape).copy_(source)
        return None

    def _write_received(self, all_sent: Sequence[list[Tensor] | None]) -> None:
        """Write on rank 0 what workers on other hosts have sent."""
        for places, sent in zip(self._places, all_sent, strict=True):
            for start, tensor in zip(places, sent or (), strict=False):
                if tensor.numel():
                    self._view(start, tensor.dtype, tensor.shape).copy_(tensor)

    def _view(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        if self._mapped is None:
            self._mapped = mmap.mmap(self._memory, self._size)
        return torch.frombuffer(self._mapped, dtype=dtype, count=math.prod(shape), offset=start).view(tuple(shape))

    def close(self) -> None:
        """Free the memory."""
        self._mapped = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _open_of_process(process: int, descriptor: int, nonce: bytes) -> int:
    """Return a descriptor of rank 0's memory; -1 on another host, or where the system shows no other's files."""
    # No such process on this host, or /proc of another user: the parts are sent instead.
    with suppress(OSError):
        memory = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        if os.pread(memory, _NONCE_BYTES, 0) == nonce:
            return memory
        os.close(memory)
    return -1


class BoardReader:
    """Reads whole tensors from a board, in the process that made it or one that was forked from that.

    Args:
        memory: descriptor of the memory.
        record: the state that is on the board.

    Attributes:
        plain: what of the state is no tensor.
    """

    def __init__(self, memory: int, record: BoardRecord) -> None:
        self._tensors, self.plain = record.tensors, record.plain
        self._mapped = mmap.mmap(memory, os.fstat(memory).st_size)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of a global name."""
        return name in self._tensors

    def read_whole(self, name: str) -> Tensor:
        """Return a copy of a whole tensor."""
        saved = self._tensors[name]
        dtype, full_tensor = DTYPES[saved.dtype], torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        everything = Rectangle((0,) * len(saved.shape), saved.shape)
        for start, offsets, lengths in saved.chunks:
            count = math.prod(lengths)
            if count:
                part = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=start).view(lengths)
                full_tensor[Rectangle(offsets, lengths).slices_in(everything)] = part
        return torch.view_as_complex(full_tensor) if saved.is_complex else full_tensor

    def fill(self, name: str, region: Region, local: Tensor) -> None:
        """Fill a whole tensor, as :meth:`.SavedState.fill` fills a part.

        Raises:
            PolylaneError: the board does not have it, or in another shape.
        """
        if name not in self._tensors:
            raise PolylaneError(f"{name} is in no worker's state, or in parts that make up no whole")
        full_tensor = self.read_whole(name)
        if full_tensor.shape != local.shape:
            raise PolylaneError(f"{name} has the shape {list(full_tensor.shape)}, expected {list(region.shape)}")
        with torch.no_grad():
            local.copy_(full_tensor)
