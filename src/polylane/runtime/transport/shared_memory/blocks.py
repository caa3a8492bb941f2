"""Shared-memory allocator: blocks of files without a name, in which one worker writes and the others read.

A file that has no name is gone with the last process that holds it, whatever the death; no other user can open it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor

ARENA = 8 << 20  # bytes of the first file; each further one is as large as all before it
SMALLEST = 4 << 10
PRESSED = 0.5  # of the bound: from here on readers are asked to let go of what they have read at once


@dataclass(slots=True)
class SharedFile:
    """A shared file, of which all blocks of one worker are parts.

    Attributes:
        number: its name among those of its owner.
        descriptor: of the file, to be handed to peers; -1 at a reader, which needs none.
        map: the file's memory in this process.
        known_peers: the peers that have it.
    """

    number: int
    descriptor: int
    map: mmap.mmap
    known_peers: set[int] = field(default_factory=set)

    def view(self, offset: int, dtype: torch.dtype, elements: int) -> Tensor:
        """A tensor of one dimension over one or more elements; its storage ends where it does."""
        return torch.frombuffer(self.map, dtype=dtype, count=elements, offset=offset)


@dataclass(slots=True)
class SharedBlock:
    """A part of an arena, in the hands of one message at a time.

    Attributes:
        number: its name among those of its owner.
        arena: the file that it is a part of.
        offset: of its first byte in the arena.
        size: in bytes, a power of two.
        readers: answers to come before it is free again.
    """

    number: int
    arena: SharedFile
    offset: int
    size: int
    readers: int = 0

    def view(self, dtype: torch.dtype, elements: int, first: int = 0) -> Tensor:
        """A tensor of one dimension over its elements from ``first`` on."""
        return self.arena.view(self.offset + first * dtype.itemsize, dtype, elements)


class SharedBlocks:
    """A worker's own blocks: taken for a message, free again once all its readers have answered.

    Sizes are powers of two, so that blocks are found again; pages that nobody touched take no memory. What has been
    touched is kept, because fresh pages cost more than the copy (64 MB: 42 ms, and 7 ms when warm). So a worker keeps
    room for all that it ever had under way at once: of 48 MiB of gradients that it sums in a step, 48 MiB.

    Args:
        bound: bytes in use from which on a new block waits for an old one.
    """

    def __init__(self, bound: int) -> None:
        self.max_bytes = bound
        self.bytes_used = 0  # bytes of messages that somebody has still to read
        self._all: list[SharedBlock] = []
        self._free: dict[int, list[SharedBlock]] = {}
        self._arena: SharedFile | None = None
        self._filled = 0
        self._arenas: list[SharedFile] = []

    @property
    def is_short(self) -> bool:
        """Whether so much is in use that readers should let go of it at once."""
        return self.bytes_used > PRESSED * self.max_bytes

    def acquire_block(self, nbytes: int, readers: int, fresh: bool = True) -> SharedBlock | None:
        """A block for a message; None where too much is in use.

        Args:
            nbytes: bytes of the message's values.
            readers: how many answers free it again.
            fresh: make a new one where no old one is free; otherwise there is none.
        """
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free and (not fresh or (self.bytes_used and self.bytes_used + size > self.max_bytes)):
            return None
        block = free.pop() if free else self._carve_block(size)
        block.readers = readers
        self.bytes_used += size
        return block

    def release_block(self, number: int, times: int = 1) -> None:
        """A reader has answered ``times`` times for the block of this number."""
        block = self._all[number]
        block.readers -= times
        if block.readers == 0:
            self.bytes_used -= block.size
            self._free[block.size].append(block)

    def close(self) -> None:
        """Close the files; memory that is still seen by tensors is released with these."""
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
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("polylane", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
    else:
        with tempfile.TemporaryFile() as file:  # made for this user alone, and without a name
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    return SharedFile(number, descriptor, memory)


def open_arena(number: int, descriptor: int) -> SharedFile:
    """A peer's arena, by the file that came from it; takes the descriptor."""
    try:
        # Writable, as the tensors over it are; a reader writes to none before its owner has given it up.
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    return SharedFile(number, -1, memory)


def max_block_bytes(workers: int) -> int:
    """Bytes that each of ``workers`` workers of this host may have in use: together half of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * workers)
