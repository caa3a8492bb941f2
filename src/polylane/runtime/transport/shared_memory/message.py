"""Message format between two workers of one host: a header, a description, and what the header's kind says.

    kind        description           what follows
    WITHIN      kind, dtype, shape    the values, up to INLINE bytes
    IN_BLOCK    kind, dtype, shape    nothing: the values are in the shared block that the header names
    ANSWERS     none                  numbers of the receiver's blocks that the sender has read

Description and header say what the sender does: a message whose description differs from what its receiver expects is
an error there, which names both operations.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.runtime.transport.protocol import OperationsDiffer
from polylane.runtime.transport.shared_memory.blocks import SharedFile

INLINE = 64 << 10  # largest values in bytes that are sent inside their message; larger ones are in a block
LONGEST = INLINE + 4096  # bytes of the longest message, with its header and the shape of a tensor of 64 dimensions

# Header: key; kind; bytes of the description; numbers of arena and block; offset in the arena; bytes of the values.
HEADER = struct.Struct("=QHHIIQQ")
WITHIN, IN_BLOCK, ANSWERS = 0, 1, 2  # kinds, see the module
PRESSED = 4  # flag, added to IN_BLOCK: the sender is short of memory, so the receiver answers at once
NO_BLOCK = (0, 0, 0)

SEND, SUM, GATHER, SCATTER, BROADCAST, EXCHANGE, OBJECT = range(7)
# Their names in errors, and but for the last one in the counters of a transport.
NAMES = ("send", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "exchange of objects")

# A dtype is sent as its index in this list, which is equal at all workers: they run the same torch.
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(slots=True)
class Message:
    """A message with values from a peer.

    Attributes:
        peer: rank of the worker that sent it.
        description: encoded operation, dtype and shape; see :func:`encode_description`.
        nbytes: number of bytes of the values.
        values: the values inside the message, or None if they are in a block.
        arena: the sender's file that has the values, or None.
        block: number of the sender's block, for the answer.
        offset: position of the first byte of the values in the arena.
        is_sender_short: whether the sender is short of memory and wants its block back soon.
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
        """Return the values as a vector over the message or the block; invalid once the block was answered."""
        if self.values is not None:
            return torch.frombuffer(self.values, dtype=dtype)
        assert self.arena is not None
        return self.arena.view(self.offset, dtype, self.nbytes // dtype.itemsize)

    def as_bytes(self) -> bytes | bytearray:
        """Return the values as bytes; those in a block are copied."""
        if self.values is not None:
            return self.values
        assert self.arena is not None
        return self.arena.map[self.offset : self.offset + self.nbytes]


@functools.lru_cache(maxsize=4096)
def encode_description(kind: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Encode operation, dtype and shape, which must be equal at both ends of a message."""
    return struct.pack(f"=BB{len(shape)}Q", kind, _CODES[dtype], *shape)


def format_description(description: bytes) -> str:
    """Return a description in words, as ``"send of torch.float32 (3, 4)"``."""
    kind, code, *shape = struct.unpack(f"=BB{(len(description) - 2) // 8}Q", description)
    return f"{NAMES[kind]} of {_DTYPES[code]} {tuple(shape)}"


def mismatch_error(rank: int, expected: bytes, message: Message) -> OperationsDiffer:
    """Return the error for a message whose description differs from what this rank expects."""
    peer_call, own_call = format_description(message.description), format_description(expected)
    if expected[0] == message.description[0] == SEND:
        peer_call, own_call = peer_call.removeprefix("send of "), own_call.removeprefix("send of ")
        return OperationsDiffer(f"rank {message.peer} sent {peer_call}, rank {rank} expected {own_call}")
    return OperationsDiffer(f"rank {message.peer} asked for {peer_call}, where rank {rank} asked for {own_call}")


def memory_of(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the memory of a contiguous tensor of any dtype as bytes, valid as long as the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
