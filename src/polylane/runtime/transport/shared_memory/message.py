"""Message format between two workers of one host: a header, a description, and what the header's kind says.

    kind        description           what follows
    WITHIN      kind, dtype, shape    the values, up to INLINE bytes
    IN_BLOCK    kind, dtype, shape    nothing: the values are in the shared block that the header names
    ANSWERS     none                  numbers of the receiver's blocks that the sender has read

The description is what both ends must agree on; a message that says other than its receiver expects is an error there.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.runtime.transport.shared_memory.blocks import SharedFile

INLINE = 64 << 10  # bytes that travel inside their message; what is longer is in a block
LONGEST = INLINE + 4096  # bytes of a message, with its header and the shape of a tensor of 64 dimensions

# Of every message: the key; what follows; bytes of the description; arena and block; offset there; bytes of the values.
HEADER = struct.Struct("=QHHIIQQ")
WITHIN, IN_BLOCK, ANSWERS = 0, 1, 2  # what follows: values; nothing, they are in the block; blocks that have been read
PRESSED = 4  # added to IN_BLOCK: the sender is short of memory
NO_BLOCK = (0, 0, 0)

SEND, SUM, GATHER, SCATTER, BROADCAST, EXCHANGE, OBJECT = range(7)
_NAMES = (
    "send",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "exchange of objects",
)

# The same list in every worker: all run the same torch.
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(slots=True)
class Message:
    """Values that came from a peer.

    Attributes:
        peer: rank of the worker that sent them.
        description: what the peer does, packed; see :func:`encode_description`.
        nbytes: bytes of the values.
        values: themselves, or None where they are in a block.
        arena, block, offset: where; the block's number is for the answer.
        is_sender_short: the sender is short of memory.
    """

    peer: int
    description: bytes
    nbytes: int
    values: bytearray | None
    arena: SharedFile | None = None
    block: int = 0
    offset: int = 0
    is_sender_short: bool = False

    def as_tensor(self, dtype: torch.dtype) -> Tensor:
        """The values as a vector over the message or the block; invalid once the block has been answered for."""
        if self.values is not None:
            return torch.frombuffer(self.values, dtype=dtype)
        assert self.arena is not None
        return self.arena.view(self.offset, dtype, self.nbytes // dtype.itemsize)

    def as_bytes(self) -> bytes | bytearray:
        """The values as bytes."""
        if self.values is not None:
            return self.values
        assert self.arena is not None
        return self.arena.map[self.offset : self.offset + self.nbytes]


@functools.lru_cache(maxsize=4096)
def encode_description(kind: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What both ends must agree on: what is being done, with which dtype, and which shape."""
    return struct.pack(f"=BB{len(shape)}Q", kind, _CODES[dtype], *shape)


def format_description(description: bytes) -> str:
    """A description in words, as ``"send of torch.float32 (3, 4)"``."""
    kind, code, *shape = struct.unpack(f"=BB{(len(description) - 2) // 8}Q", description)
    return f"{_NAMES[kind]} of {_DTYPES[code]} {tuple(shape)}"


def mismatch_error(rank: int, expected: bytes, message: Message) -> ValueError:
    """The error for a message that says other than this rank."""
    there, here = format_description(message.description), format_description(expected)
    if expected[0] == message.description[0] == SEND:
        there, here = there.removeprefix("send of "), here.removeprefix("send of ")
        return ValueError(f"rank {message.peer} sent {there}, rank {rank} expected {here}")
    return ValueError(f"rank {message.peer} asked for {there}, where rank {rank} asked for {here}")


def memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous tensor of any dtype, where they are: for as long as the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
