"""Counter-based random numbers: each is a function of (seed, step, node, sample, element), never of the rank.

In the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), here with the 32-bit integer
mixer "lowbias32" (Wellons, hash prospector), keyed twice. A worker draws only the numbers of its own samples, and two
workers that hold the same value draw the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_CHUNK = 1 << 16  # elements mixed at a time: fits into a core's cache
_CHUNK_ELSEWHERE = 1 << 26  # on accelerators, where every operator is a launch
_HIGH = 0x9E3779B9  # spreads the counter's upper 32 bits over the second key


def salt_of(name: str) -> int:
    """Return a node's own 62-bit number, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _signed(value: int) -> int:
    # torch's int32 takes signed numbers: the same bits in two's complement.
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _derive_keys(part: Any, salt: int) -> tuple[int, int]:
    """Return two 32-bit keys from seed, step and node, spread by splitmix64 (Steele et al., OOPSLA'14)."""
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
    """Apply lowbias32 in place; int32 arithmetic wraps, and the mask makes the arithmetic shift a logical one."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, _signed(0x846CA68B)), (16, 0xFFFF, 0)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_(mask)
        x.bitwise_xor_(scratch)
        if factor:
            x.mul_(factor)


def random_bits(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for every element of a value whose samples are ``part``'s.

    Args:
        part: the sample slice; its seed, step and first sample enter the counters.
        salt: the node's own number, see :func:`salt_of`.
        shape: local shape: of the whole value, or of the slice's region of it.
        batch_dim: the dimension that holds the samples (possibly several rows a sample); None when the value does not
            depend on the samples and is the same on every worker.
        device: device of the returned tensor.
    """
    full_shape = list(shape) if part.region is None else part.region.whole(shape)
    # Samples come first in the counter, so that a sample's elements are contiguous whatever the slice.
    order = list(range(len(full_shape)))
    if batch_dim:
        order.insert(0, order.pop(batch_dim))
    count = math.prod(full_shape)
    # What does not belong to samples is drawn once a step, the same by all workers that hold it.
    offset = part.first * (count // part.samples) if batch_dim is not None and part.samples else 0
    keys = _derive_keys(part, salt)
    out = torch.empty([shape[d] for d in order], dtype=torch.int32, device=device)
    if part.region is None:
        _draw_all(out.view(-1), offset, keys)
    elif out.numel():
        ranges = {dim: spans for dim, _, spans in part.region.cuts}
        sizes = [full_shape[d] for d in order]
        _draw_region(out, sizes, [ranges.get(d, ((0, full_shape[d]),)) for d in order], offset, keys)
    return out.movedim(0, batch_dim) if batch_dim else out


def _chunk_on(device: torch.device) -> int:
    return _CHUNK if device.type == "cpu" else _CHUNK_ELSEWHERE


def _draw_all(out: Tensor, offset: int, keys: tuple[int, int]) -> None:
    """Fill ``out`` with bits for consecutive counters from ``offset`` on."""
    chunk = _chunk_on(out.device)
    scratch = torch.empty(min(out.numel(), chunk), dtype=torch.int32, device=out.device)
    start = 0
    # Counters have 64 bits, the mixer 32: the upper half changes the second key, and a chunk must not straddle the
    # border.
    while start < out.numel():
        high, low = divmod(offset + start, 1 << 32)
        size = min(chunk, out.numel() - start, (1 << 32) - low)
        x = out[start : start + size]
        if low + size < 1 << 31:
            torch.arange(low, low + size, out=x)
        else:
            x.copy_(torch.arange(low, low + size, device=x.device))  # the cast to int32 wraps, as intended
        _hash(x, scratch[:size], keys[0], _signed(keys[1] + high * _HIGH))
        if is_without_data(out):
            return  # fake tensors: one chunk shows the operators of all
        start += size


def is_without_data(tensor: Tensor) -> bool:
    """Return whether a tensor only stands for one: it is fake, or on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


_Ranges = Sequence[tuple[int, int]]


def _draw_region(
    out: Tensor, sizes: Sequence[int], ranges: Sequence[_Ranges], offset: int, keys: tuple[int, int]
) -> None:
    """Fill ``out``, a region, with bits whose counters are those of the whole value of ``sizes``.

    An element's counter is the sum of a term of its leading indices and one of its trailing indices, so that no table
    is as large as the value unless one dimension is most of it.
    """
    chunk = _chunk_on(out.device)
    inner = max(len(sizes) - 1, 0)  # where the trailing dimensions begin
    while inner and math.prod(out.shape[inner - 1 :]) <= chunk:
        inner -= 1
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    rows = _offsets(ranges[:inner], strides[:inner], out.device) + offset
    columns = _offsets(ranges[inner:], strides[inner:], out.device)
    table = out.view(len(rows), len(columns))
    across, down = min(len(columns), chunk), max(1, chunk // max(len(columns), 1))
    scratch = torch.empty(across * min(down, len(rows)), dtype=torch.int32, device=out.device)
    # Only if counters of the value differ in their upper halves must these be computed per element.
    far = offset >> 32 != (offset + math.prod(sizes) - 1) >> 32
    low = rows.to(torch.int32), columns.to(torch.int32)  # int32 sums wrap, as intended
    for top in range(0, len(rows), down):
        for left in range(0, len(columns), across):
            row_slice, column_slice = slice(top, top + down), slice(left, left + across)
            x = table[row_slice, column_slice]
            torch.add(low[0][row_slice, None], low[1][None, column_slice], out=x)
            second_key: Any = _signed(keys[1] + (offset >> 32) * _HIGH)
            if far:
                high = (rows[row_slice, None] + columns[None, column_slice]) >> 32
                second_key = high.mul_(_HIGH).add_(keys[1]).to(torch.int32).view(-1)
            _hash(x.view(-1), scratch[: x.numel()], keys[0], second_key)
            if is_without_data(out):
                return


def _offsets(ranges: Sequence[_Ranges], strides: Sequence[int], device: torch.device) -> Tensor:
    """Return what the indices in these ranges add to an element's counter, in order."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for spans, stride in zip(ranges, strides, strict=True):
        steps = [torch.arange(start * stride, stop * stride, stride, device=device) for start, stop in spans]
        total = (total[:, None] + torch.cat(steps)[None, :]).view(-1)
    return total


def _hash(x: Tensor, scratch: Tensor, key: int, other: Any) -> None:
    """Turn counters (their lower 32 bits) into bits, in place: mix(mix(counter + key) ^ other)."""
    x.add_(_signed(key))
    _mix(x, scratch)
    x.bitwise_xor_(other)
    _mix(x, scratch)


def uniform(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return numbers in (0, 1), float64, of 32 random bits each."""
    # Signed bits plus 2^31 + 0.5, over 2^32: never exactly 0 or 1.
    return random_bits(part, salt, shape, batch_dim, device).to(torch.float64).add_(2147483648.5).div_(4294967296.0)


def normal(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Return standard normal numbers, float64 (Box-Muller)."""
    radius = uniform(part, salt, shape, batch_dim, device).log_().mul_(-2.0).sqrt_()
    angle = uniform(part, salt ^ 0x5DEECE66D, shape, batch_dim, device).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def keep_mask(
    part: Any, salt: int, p: float, shape: Sequence[int], batch_dim: int | None, device: torch.device
) -> Tensor:
    """Return a mask that is True with probability 1 - p."""
    # Signed bits are uniform over [-2^31, 2^31).
    threshold = min(int(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    return random_bits(part, salt, shape, batch_dim, device) >= threshold


def seed_of(part: Any, salt: int) -> int:
    """Return a seed for torch's own generator, for the user's own Python: from step, node and first local sample."""
    high, low = _derive_keys(part, salt ^ part.first * 0x9E3779B97F4A7C15)
    return high << 31 ^ low


def python_seed_of(part: Any, salt: int) -> int:
    """Return a seed for Python's and numpy's generators, for the user's own Python: from step, microbatch and node.

    It is equal on all replicas: what is drawn there is more often a decision about the step (which layers to drop) than
        numbers for samples.
    """
    high, low = _derive_keys(part, salt ^ (part.microbatch + 1) * 0xD6E8FEB86659FD93)
    return high << 31 ^ low
