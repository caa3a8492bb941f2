"""Random bits, masks and dropout in one Triton kernel: the bits of counter_mixer.py.

An element's counter is linear in its indices as long as every dimension has one range, so that the kernel needs no
table. Imported only where Triton is installed and the device is a GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from polylane.graph.operators.counter_mixer import Counters, to_signed

_BLOCK = 1024  # elements of a program


# Triton reads annotations as code: kernels have none.
@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


# Numbers that change from step to step must not be compiled in.
@triton.jit(do_not_specialize=["low", "high", "key", "second_key", "threshold", "scale_bits"])
def _draw(  # type: ignore[no-untyped-def]
    bits, mask, x, dropped, count, sizes, strides, low, high, key, second_key, threshold, scale_bits,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    index = program * BLOCK + tl.arange(0, BLOCK)
    bounds = index < count
    position = index
    counter = (high.to(tl.int64) << 32) + low.to(tl.uint32, bitcast=True).to(tl.int64)
    for dim in tl.static_range(len(sizes) - 1, 0, -1):
        counter += (position % sizes[dim]).to(tl.int64) * strides[dim]
        position = position // sizes[dim]
    counter += position.to(tl.int64) * strides[0]
    upper_key = (counter >> 32).to(tl.uint32) * 0x9E3779B9 + second_key.to(tl.uint32, bitcast=True)
    mixed = _mix(_mix(counter.to(tl.uint32) + key.to(tl.uint32, bitcast=True)) ^ upper_key).to(tl.int32, bitcast=True)
    if bits is not None:
        tl.store(bits + index, mixed, mask=bounds)
    if mask is not None:
        keep = mixed >= threshold
        tl.store(mask + index, keep, mask=bounds)
        if x is not None:
            value = tl.load(x + index, mask=bounds)
            scale = scale_bits.to(tl.float64, bitcast=True)
            if value.dtype == tl.float64:
                product = value * keep.to(tl.float64) * scale
            else:  # as torch does: 16-bit numbers are multiplied in 32 bits, and rounded once, to the nearest
                product = value.to(tl.float32) * keep.to(tl.float32) * scale.to(tl.float32)
            tl.store(dropped + index, product.to(value.dtype), mask=bounds)


def draw_bits(counters: Counters, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for every element of the counters' local part."""

    def draw(box: Counters) -> Tensor:
        bits = torch.empty(box.shape, dtype=torch.int32, device=device)
        _launch(box, bits=bits)
        return bits

    return _join_boxes(draw, counters)


def draw_mask(counters: Counters, threshold: int, device: torch.device) -> Tensor:
    """Return a mask that is True where the bits, as a signed number, are at least ``threshold``."""

    def draw(box: Counters) -> Tensor:
        mask = torch.empty(box.shape, dtype=torch.bool, device=device)
        _launch(box, mask=mask, threshold=threshold)
        return mask

    return _join_boxes(draw, counters)


def drop(x: Tensor, dropped: Tensor, counters: Counters, threshold: int, scale: float) -> Tensor:
    """Write ``x``, whose memory is in the order of the counters, times its mask times ``scale``; return the mask.

    Args:
        x: what is dropped of, in the counters' shape.
        dropped: a tensor of the same shape, laid out in memory as ``x`` is.
        counters: counters with one range along every dimension.
        threshold: the least number, of signed bits, that is kept.
        scale: factor of what is kept.
    """
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    _launch(counters, mask=mask, x=x, dropped=dropped, threshold=threshold, scale=scale)
    return mask


def _join_boxes(draw: Callable[[Counters], Tensor], counters: Counters) -> Tensor:
    dim, boxes = counters.split_spans()
    if len(boxes) == 1:
        return draw(counters)
    return torch.cat([_join_boxes(draw, box) for box in boxes], dim)


def _launch(
    counters: Counters,
    bits: Tensor | None = None,
    mask: Tensor | None = None,
    x: Tensor | None = None,
    dropped: Tensor | None = None,
    threshold: int = 0,
    scale: float = 1.0,
) -> None:
    count = math.prod(counters.shape)
    if not count:
        return
    sizes, strides = _merge_dimensions(counters)
    starts = [spans[0][0] for spans in counters.ranges]
    base = counters.offset + sum(start * step for start, step in zip(starts, counters.strides, strict=True))
    (scale_bits,) = struct.unpack("<q", struct.pack("<d", scale))
    written = bits if mask is None else mask
    assert written is not None
    with torch.cuda.device_of(written):
        _draw[(triton.cdiv(count, _BLOCK),)](
            bits, mask, x, dropped, count, sizes, strides, to_signed(base), to_signed(base >> 32),
            to_signed(counters.keys[0]), to_signed(counters.keys[1]), threshold, scale_bits,
            WIDE=count > (1 << 31) - _BLOCK, BLOCK=_BLOCK,
        )  # fmt: skip


def _merge_dimensions(counters: Counters) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return local sizes and strides of the counters, with as few dimensions as hold them."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(counters.shape, counters.strides, strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size > 1:
            merged.append((size, stride))
    sizes, strides = zip(*merged, strict=True) if merged else ((1,), (1,))
    return sizes, strides
