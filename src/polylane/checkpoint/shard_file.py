"""Shard files: safetensors that are written from shared memory, with a checksum of each tensor, and read in parts.

    8 bytes: length of the header    header: JSON with dtype, shape and place of each tensor    the tensors' bytes

The writer needs nothing but the standard library, so that a process for it starts in a few hundredths of a second; any
reader of safetensors reads its files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 4 << 20  # bytes that are written at once: large enough for a disk, and a writer looks often whether to give up
_ALIGN = 8  # safetensors has its tensors begin at such multiples


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written.

    Attributes:
        key: name of the tensor in the file.
        dtype: the element type, as safetensors names it.
        shape: length of the tensor in each dimension.
        start: position of its bytes in the memory that the file is written from.
        size: number of its bytes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class WrittenFile:
    """What was written: the file's size in bytes, and the CRC-32 of each entry's bytes, in their order."""

    size: int
    checksums: tuple[int, ...]


def write_shard_file(
    path: str, entries: Sequence[Entry], memory: memoryview, before_block: Callable[[], None] = lambda: None
) -> WrittenFile:
    """Write tensors as a safetensors file, and wait until it is on the disk.

    Args:
        path: of the file, which must not exist.
        entries: the tensors, in the order of their bytes in the file.
        memory: bytes of all tensors.
        before_block: called before each block of bytes; it may raise to give up.

    Raises:
        OSError: the file cannot be written; what there is of it is left.
    """
    checksums = list[int]()
    with open(path, "xb", buffering=0) as file:
        written = write_header(file, [(entry.key, entry.dtype, entry.shape, entry.size) for entry in entries])
        for entry in entries:
            checksum = 0
            for begin in range(entry.start, entry.start + entry.size, BLOCK):
                before_block()
                block = memory[begin : min(begin + BLOCK, entry.start + entry.size)]
                checksum = zlib.crc32(block, checksum)
                write_all(file, block)
            checksums.append(checksum)
        before_block()
        os.fsync(file.fileno())
    return WrittenFile(written + sum(entry.size for entry in entries), tuple(checksums))


def write_header(file: Any, tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> int:
    """Write the beginning of a safetensors file; return the number of its bytes.

    Args:
        file: a new file, unbuffered.
        tensors: (name, element type, shape, number of bytes) of each tensor, in the order of their bytes.
    """
    header, at = dict[str, Any](), 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
    return 8 + len(text)


def write_all(file: Any, block: memoryview) -> None:
    """Write all bytes to an unbuffered file, which may take a part of them at a time."""
    while block:
        block = block[file.write(block) :]
