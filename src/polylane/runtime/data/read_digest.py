"""Read digests: a number for what a worker has read, equal on two workers that have read the same.

A checksum of every byte would cost a pass over memory in every step. Of each tensor some words are taken instead, at
places that move from step to step, so that each of them is looked at in turn; a digest of other samples, or of samples
in another order, differs at once. It is computed where the tensors are: nobody waits for an accelerator.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WORDS = 256  # words that are taken of a tensor; twice as many at most
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (type(None), bool, int, float, str, bytes)
_STEP = 7919  # a prime: places of one step to the next are far from each other


def digest_leaves(leaves: Sequence[Any], turn: int, device: torch.device) -> Tensor:
    """Return the digest of values that a worker has read, as an int64 scalar.

    Args:
        leaves: tensors and plain values, in order; of other objects only their types count.
        turn: number of the step, which decides the places that are looked at.
        device: where the digest is wanted.
    """
    words, plain = list[Tensor](), list[Any]()
    for leaf in leaves:
        value = torch.from_numpy(leaf) if _is_array(leaf) else leaf
        if not isinstance(value, Tensor):
            plain.append(value if type(value) in _PLAIN else type(value).__qualname__)
            continue
        plain.append((value.element_size(), *value.shape))
        if value.layout is torch.strided and value.numel():
            words.append(_take_words(value.detach(), turn).to(device, non_blocking=True))
    of_plain = zlib.crc32(repr(plain).encode())
    if not words:
        return torch.full((), of_plain, dtype=torch.int64, device=device)
    taken = torch.cat(words)
    return (taken * _weights(len(taken).bit_length(), device)[: len(taken)]).sum() + of_plain


def _is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray" and value.dtype.kind in "biufc" and value.dtype.isnative


def _take_words(value: Tensor, turn: int) -> Tensor:
    """Return some elements of a tensor as integers of their bits; no copy of it is made."""
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()
    bits, count = plain.view(_BITS[plain.element_size()]), plain.numel()
    # Odd, so that it does not fall on the same column of each row: that may be padding, or the edge of an image.
    stride = count // WORDS | 1
    return torch.take(bits, torch.arange(turn * _STEP % stride, count, stride, device=bits.device)).long()


@functools.lru_cache(maxsize=8)
def _weights(bits: int, device: torch.device) -> Tensor:
    """Return 2^bits random numbers, always the same: with them a sum depends on the order of what is summed."""
    return torch.randint(1 << 62, (1 << bits,), generator=torch.Generator().manual_seed(bits)).to(device)
