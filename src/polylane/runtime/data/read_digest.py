"""Read digests: a number for what a worker has read, equal on two workers that have read the same.

A checksum of every byte would cost a pass over memory in every step. Of each tensor some words are taken instead, at
places that move from step to step, so that each of them is looked at in turn; a digest of other samples, or of samples
in another order, differs at once. It is computed where the tensors are: nobody waits for an accelerator. In the host's
memory numpy takes the words, which needs a tenth of the time that torch's operators need for so few.

The digest of a tensor is a sum of its words with fixed weights, modulo 2^51, equal for numpy and on every device.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = 256  # words that are taken of a tensor; twice as many at most
MASK = (1 << 51) - 1  # digests are below: float64 has them exactly, twice and with one added
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ARRAY_BITS = {np.dtype(name): np.dtype(f"i{np.dtype(name).itemsize}") for name in "?bBhHiIlLqQefd"}  # native ones
_PLAIN_DTYPES = {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64}
_PLAIN = (type(None), bool, int, float, str, bytes)
_ARRAYS = (Tensor, np.ndarray, np.generic)
_STEP = 7919  # a prime: places of one step to the next are far from each other
_RADIX = 1009  # the digest of several tensors is a number with theirs as digits: less than 2^63 before it is cut off


def digest_leaves(leaves: Sequence[Any], turn: int, device: torch.device) -> int | Tensor:
    """Return the digest of values that a worker has read: a number, or an int64 scalar on its device.

    Args:
        leaves: tensors, numpy's arrays and plain values, in order; of other objects only their types count.
        turn: number of the step, which decides the places that are looked at.
        device: where the digest is wanted if tensors are not in the host's memory, whose digests are numbers.
    """
    total: int | Tensor = 0
    plain = list[Any]()
    for leaf in leaves:
        if not isinstance(leaf, _ARRAYS):
            plain.append(leaf if type(leaf) in _PLAIN else type(leaf).__qualname__)
            continue
        is_complex = leaf.is_complex() if isinstance(leaf, Tensor) else leaf.dtype.kind == "c"
        for part in (leaf.real, leaf.imag) if is_complex else (leaf,):
            plain.append((part.itemsize, *part.shape))
            digest = _digest_tensor(part, turn, device) if isinstance(part, Tensor) else _digest_array(part, turn)
            total = (total * _RADIX + digest) & MASK
    return (total + zlib.crc32(repr(plain).encode())) & MASK


def _digest_tensor(value: Tensor, turn: int, device: torch.device) -> int | Tensor:
    """Return the digest of a real tensor, on ``device`` unless it is in the host's memory."""
    if value.layout is not torch.strided:
        return 0
    if value.is_cpu and value.dtype in _PLAIN_DTYPES and not (value.requires_grad or value.is_neg()):
        return _digest_array(value.numpy(), turn)  # nearly always: a few operations on the way here cost more than it
    bits = value.as_subclass(Tensor).resolve_neg().view(_BITS[value.element_size()])
    if value.is_cpu:
        return _digest_array(bits.numpy(), turn)
    words = torch.take(bits, torch.arange(*_places(value.numel(), turn), device=value.device)).long()
    folded = words ^ (words >> 32) if value.element_size() == 8 else words
    total = (folded * _weights_on(value.device)[: len(words)]).sum()
    return total.to(device, non_blocking=device.type != "cpu")  # the host would read what has not arrived


def _digest_array(value: NDArray[Any] | np.generic, turn: int) -> int:
    """Return the digest of an array of real numbers, or of anything else that numpy has."""
    array = np.asarray(value)
    # No copy of the array is made, whatever its strides.
    elements = array.reshape(-1) if array.flags.c_contiguous else array.flat
    start, count, stride = _places(array.size, turn)
    words = elements[start:count:stride]
    if (bits := _ARRAY_BITS.get(array.dtype)) is None:
        # Dates, texts, records, long floats: some of their bytes mean nothing. What an object shows may be its address.
        return 0 if array.dtype.hasobject else zlib.crc32(repr(words.tolist()).encode())
    words = words.view(bits)
    # Modulo 2^51 the sign and the exponent of a float64 would not count: they are folded onto its lower bits.
    folded = words ^ (words >> 32) if words.itemsize == 8 else words.astype(np.int64)
    return int(folded.dot(_WEIGHTS[: len(words)]))


def _places(count: int, turn: int) -> tuple[int, int, int]:
    """Return start, end and stride of the words that are taken of so many."""
    # Odd, so that it does not fall on the same column of each row: that may be padding, or the edge of an image.
    stride = count // WORDS | 1
    return turn * _STEP % stride, count, stride


# Always the same numbers, for a sum that depends on the order of what is summed; odd, so that no bit of a word is lost.
_WEIGHTS = np.frombuffer(hashlib.shake_256(b"words").digest(16 * WORDS), dtype="<i8").astype(np.int64) | 1


@functools.lru_cache(maxsize=8)
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_WEIGHTS).to(device)
