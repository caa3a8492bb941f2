"""Random operators with a key: every number is a function of (seed, step, node, sample, element), never of the rank.

A counter-based generator in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), here
with the 32-bit integer mixer "lowbias32" (Wellons, hash prospector), keyed twice. A worker draws just the numbers of
its own samples, and two workers that hold the same value draw the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements mixed at a time: stays in a core's cache


def salt_of(name: str) -> int:
    """A node's own 62-bit number, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _keys(part: Any, salt: int) -> tuple[int, int]:
    """Two 32-bit keys from seed, step and node, spread by splitmix64 (Steele et al., OOPSLA'14)."""
    state = (part.seed * 0x9E3779B97F4A7C15 + part.step * 0xD1B54A32D192ED03 + salt) & 0xFFFFFFFFFFFFFFFF
    keys = []
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        keys.append((mixed ^ (mixed >> 31)) & 0xFFFFFFFF)
    return keys[0], keys[1]


def _mix(x: Tensor, scratch: Tensor) -> None:
    """lowbias32 in place; int32 arithmetic wraps, and the mask makes the arithmetic shift a logical one."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, _signed(0x846CA68B)), (16, 0xFFFF, 0)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_(mask)
        x.bitwise_xor_(scratch)
        if factor:
            x.mul_(factor)


def bits(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """32 random bits (int32) for every element of a value whose samples are ``part``'s.

    ``batch_dim`` is the dimension that holds the samples (possibly several rows a sample); None when the value does not
    depend on the samples and is the same on every worker.
    """
    keys = _keys(part, salt)
    order = list(shape)
    if batch_dim:
        order.insert(0, order.pop(batch_dim))
    count = math.prod(order)
    # What does not belong to samples is drawn once a step, by all who hold it alike.
    first = part.first * (count // part.samples) if batch_dim is not None and part.samples else 0
    out = torch.empty(count, dtype=torch.int32, device=device)
    scratch = torch.empty(min(count, _CHUNK), dtype=torch.int32, device=device)
    start = 0
    while start < count:
        high, low = divmod(first + start, 1 << 32)
        size = min(_CHUNK, count - start, (1 << 32) - low)
        _draw(out[start : start + size], scratch[:size], low, _signed(keys[0]), _signed(keys[1] + high * 0x9E3779B9))
        start += size
    drawn = out.view(order)
    return drawn.movedim(0, batch_dim) if batch_dim else drawn


def _draw(x: Tensor, scratch: Tensor, begin: int, key: int, other: int) -> None:
    """Bits for the counters from ``begin`` on: mix(mix(counter + key) ^ other)."""
    if begin + x.numel() < 1 << 31:
        torch.arange(begin, begin + x.numel(), out=x)
    else:
        x.copy_(torch.arange(begin, begin + x.numel(), device=x.device))  # wraps, as it should
    x.add_(key)
    _mix(x, scratch)
    x.bitwise_xor_(other)
    _mix(x, scratch)


def uniform(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Numbers in (0, 1), float64, of 32 random bits each."""
    return bits(part, salt, shape, batch_dim, device).to(torch.float64).add_(2147483648.5).div_(4294967296.0)


def normal(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Standard normal numbers, float64 (Box-Muller)."""
    radius = uniform(part, salt, shape, batch_dim, device).log_().mul_(-2.0).sqrt_()
    angle = uniform(part, salt ^ 0x5DEECE66D, shape, batch_dim, device).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def keep_mask(
    part: Any, salt: int, p: float, shape: Sequence[int], batch_dim: int | None, device: torch.device
) -> Tensor:
    """True with probability 1 - p."""
    threshold = min(int(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    return bits(part, salt, shape, batch_dim, device) >= threshold


def seed_of(part: Any, salt: int) -> int:
    """A seed for torch's own generator, for the user's own Python: of step, node and first sample in hand."""
    high, low = _keys(part, salt ^ part.first * 0x9E3779B97F4A7C15)
    return high << 31 ^ low
