"""Counters of random numbers, and the bits that they are mixed into, by torch's integer operators.

The 32-bit integer mixer "lowbias32" (Wellons, hash prospector), keyed twice. On accelerators counter_kernel.py does the
same in one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_CHUNK = 1 << 16  # elements mixed at a time: fits into a core's cache
_CHUNK_ELSEWHERE = 1 << 26  # on accelerators, where every operator is a launch
HIGH = 0x9E3779B9  # spreads the counter's upper 32 bits over the second key

_Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Counters:
    """Which counters the elements of a value have: a value of ``sizes`` has consecutive ones, a region some of them.

    Attributes:
        sizes: shape of the whole value.
        ranges: local positions along every dimension, as (start, stop) in ascending order.
        offset: counter of the whole value's first element.
        keys: two 32-bit keys of the mixer.
    """

    sizes: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    offset: int
    keys: tuple[int, int]

    @property
    def shape(self) -> list[int]:
        """Shape of the local part."""
        return [sum(stop - start for start, stop in spans) for spans in self.ranges]

    @property
    def strides(self) -> list[int]:
        """What one position along every dimension adds to a counter."""
        return [math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes))]

    def split_spans(self) -> tuple[int, list[Counters]]:
        """Return the first dimension with several ranges, and the counters of each; one part where there is none."""
        for dim, spans in enumerate(self.ranges):
            if len(spans) > 1:
                outer, inner = self.ranges[:dim], self.ranges[dim + 1 :]
                return dim, [replace(self, ranges=(*outer, (span,), *inner)) for span in spans]
        return 0, [self]


def mix_counters(counters: Counters, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for every element of the local part, by torch's operators."""
    out = torch.empty(counters.shape, dtype=torch.int32, device=device)
    if all(spans == ((0, size),) for size, spans in zip(counters.sizes, counters.ranges, strict=True)):
        _draw_all(out.view(-1), counters.offset, counters.keys)
    elif out.numel():
        _draw_region(out, counters)
    return out


def to_signed(value: int) -> int:
    """Return the number that has the same 32 bits in two's complement: torch's int32 takes signed ones."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: Tensor, scratch: Tensor) -> None:
    """Apply lowbias32 in place; int32 arithmetic wraps, and the mask makes the arithmetic shift a logical one."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, to_signed(0x846CA68B)), (16, 0xFFFF, 0)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_(mask)
        x.bitwise_xor_(scratch)
        if factor:
            x.mul_(factor)


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
        _hash(x, scratch[:size], keys[0], to_signed(keys[1] + high * HIGH))
        if is_without_data(out):
            return  # fake tensors: one chunk shows the operators of all
        start += size


def is_without_data(tensor: Tensor) -> bool:
    """Return whether a tensor only stands for one: it is fake, or on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _draw_region(out: Tensor, counters: Counters) -> None:
    """Fill ``out``, a region, with bits whose counters are those of the whole value.

    An element's counter is the sum of a term of its leading indices and one of its trailing indices, so that no table
    is as large as the value unless one dimension is most of it.
    """
    chunk, keys, offset = _chunk_on(out.device), counters.keys, counters.offset
    sizes, ranges, strides = counters.sizes, counters.ranges, counters.strides
    inner = max(len(sizes) - 1, 0)  # where the trailing dimensions begin
    while inner and math.prod(out.shape[inner - 1 :]) <= chunk:
        inner -= 1
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
            second_key: Any = to_signed(keys[1] + (offset >> 32) * HIGH)
            if far:
                high = (rows[row_slice, None] + columns[None, column_slice]) >> 32
                second_key = high.mul_(HIGH).add_(keys[1]).to(torch.int32).view(-1)
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
    x.add_(to_signed(key))
    _mix(x, scratch)
    x.bitwise_xor_(other)
    _mix(x, scratch)
