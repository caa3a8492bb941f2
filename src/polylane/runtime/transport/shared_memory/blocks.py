"""Shared-memory allocator: blocks in unnamed files (memfd), which one worker writes and the others read.

An unnamed file disappears with the last process that has it open, however that ends; no other user can open it.

    arena 0, 8 MiB                           arena 1, 8 MiB               arena 2, 16 MiB      ...
    | block 0 | block 1 |  block 2  | ...    | block 7 | ...              each as large as all before it
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polylane.runtime.nameless_file import open_nameless_file

ARENA = 8 << 20  # bytes of the first arena; each further one is as large as all before it
SMALLEST = 4 << 10  # bytes of the smallest block, one page
PRESSED = 0.5  # fraction of the bound in use, above which readers are requested to answer at once


@dataclass(slots=True)
class SharedFile:
    """A shared file ("arena"), from which one worker carves its blocks.

    Attributes:
        number: number of the file among those of its owner.
        descriptor: file descriptor, sent to peers; -1 at a reader, which needs none.
        map: the file's memory in this process.
        known_peers: ranks of the peers that have received the descriptor.
    """

    number: int
    descriptor: int
    map: mmap.mmap
    known_peers: set[int] = field(default_factory=set)

    def view(self, offset: int, dtype: torch.dtype, elements: int) -> Tensor:
        """Return a vector over one or more elements from a byte offset; its storage ends with it."""
        return torch.frombuffer(self.map, dtype=dtype, count=elements, offset=offset)


@dataclass(slots=True)
class SharedBlock:
    """A part of an arena, which belongs to one message at a time.

    Attributes:
        number: number of the block among those of its owner.
        arena: shared file that the block is a part of.
        offset: position of its first byte in the arena.
        size: size in bytes, a power of two.
        readers: number of answers until the block is free again.
    """

    number: int
    arena: SharedFile
    offset: int
    size: int
    readers: int = 0

    def view(self, dtype: torch.dtype, elements: int, start: int = 0) -> Tensor:
        """Return a vector over the block's elements from ``start`` on."""
        return self.arena.view(self.offset + start * dtype.itemsize, dtype, elements)


class SharedBlocks:
    """A worker's own blocks: acquired for a message, free again once all readers have answered.

    Sizes are powers of two, so that freed blocks fit later messages; untouched pages take no memory. Touched pages are
    kept, because fresh ones cost more than the copy (64 MB: 42 ms, but 7 ms when warm). So a worker keeps memory for
    all messages that it ever had pending at once: for 48 MiB of gradients that it sums in a step, 48 MiB.

    Args:
        bound: bytes in use above which no new block is carved.

    Attributes:
        max_bytes: bytes in use above which no new block is carved.
        bytes_used: bytes of blocks with readers that have not answered yet.
    """

    def __init__(self, bound: int) -> None:
        self.max_bytes = bound
        self.bytes_used = 0
        self._all: list[SharedBlock] = []
        self._free: dict[int, list[SharedBlock]] = {}  # by size; the last one freed is warmest
        self._arena: SharedFile | None = None
        self._filled = 0  # bytes of the latest arena that are carved into blocks
        self._arenas: list[SharedFile] = []

    @property
    def is_short(self) -> bool:
        """Whether so much is in use that readers should answer at once."""
        return self.bytes_used > PRESSED * self.max_bytes

    def acquire_block(self, nbytes: int, readers: int, fresh: bool = True) -> SharedBlock | None:
        """Return a block for a message, or None if too much is in use.

        Args:
            nbytes: number of bytes of the message's values.
            readers: number of answers that free the block again.
            fresh: whether a new block may be carved if no old one of the size is free.
        """
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        # A message larger than the bound still gets a block, once nothing else is in use.
        if not free and (not fresh or (self.bytes_used and self.bytes_used + size > self.max_bytes)):
            return None
        block = free.pop() if free else self._carve_block(size)
        block.readers = readers
        self.bytes_used += size
        return block

    def release_block(self, number: int, times: int = 1) -> None:
        """Count ``times`` answers for the block of this number, which is free after the last one."""
        block = self._all[number]
        block.readers -= times
        if block.readers == 0:
            self.bytes_used -= block.size
            self._free[block.size].append(block)

    def close(self) -> None:
        """Close the files; memory under tensors that are still alive is released with them."""
        for arena in self._arenas:
            os.close(arena.descriptor)
        self._arenas.clear()

    def _carve_block(self, size: int) -> SharedBlock:
        if self._arena is None or self._filled + size > len(self._arena.map):
            total = sum(len(arena.map) for arena in self._arenas)
            self._arena = _create_arena(len(self._arenas), max(ARENA, total, size))
            self._arenas.append(self._arena)
            self._filled = 0
        block = SharedBlock(len(self._all), self._arena, self._filled, size)
        self._all.append(block)
        self._filled += size
        return block


def _create_arena(number: int, size: int) -> SharedFile:
    descriptor = open_nameless_file("arena")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    return SharedFile(number, descriptor, memory)


def open_arena(number: int, descriptor: int) -> SharedFile:
    """Map a peer's arena from a received file descriptor, which is closed."""
    try:
        # Mapped writable, as tensors are: a received tensor is its receiver's until its block is answered.
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    return SharedFile(number, -1, memory)


def max_block_bytes(workers: int) -> int:
    """Return the bytes that each of ``workers`` workers of this host may have in use: half of its memory in total."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * workers)
