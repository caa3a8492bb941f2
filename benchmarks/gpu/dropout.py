"""Keyed random numbers: the same bits on every device, from each integer operation that makes them to the masks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.setting import Row, Setting
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.counter_rng import keep_mask, normal, random_bits, uniform
from polylane.graph.operators.keyed_random import dropout

EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 0x7FEB352D, 0x846CA68B - (1 << 32), 12345)


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def integer_operations(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the result of every integer operation of the generator on numbers at the ends of 32 bits."""
    x = torch.tensor(EXTREMES, dtype=torch.int32, device=device)
    for shift in (15, 16):
        yield f"shift by {shift}", torch.bitwise_right_shift(x, shift, out=torch.empty_like(x))
    yield "and", x.clone().bitwise_and_(0x1FFFF)
    yield "xor", x.clone().bitwise_xor_(x.flip(0))
    for factor in (0x7FEB352D, 0x846CA68B - (1 << 32)):
        yield f"product with {factor}", x.clone().mul_(factor)
    yield "sum", torch.add(x[:, None], x[None, :])
    yield "arange", torch.arange(2**31 - 9, 2**31 - 1, out=torch.empty(8, dtype=torch.int32, device=device))
    yield "cast of 64 bits", torch.arange(2**32 - 4, 2**32 + 4, device=device).to(torch.int32)
    yield "lower half", torch.arange(2**40, 2**40 + 8, device=device).bitwise_right_shift(32).to(torch.int32)


def keyed_values(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield bits, numbers and masks by key; across 2^32 counters too."""
    part = SampleSlice(6, first=2, batch=16, step=3, seed=7)
    far = SampleSlice(4, first=2**28, batch=2**28 + 4, step=1, seed=1)
    yield "bits", random_bits(part, 5, (6, 70, 33), 0, device)
    yield "bits, samples last", random_bits(part, 5, (70, 6), 1, device)
    yield "bits far out", random_bits(far, 5, (4, 16), 0, device)
    yield "uniform", uniform(part, 9, (6, 4096), 0, device)
    yield "mask of 0.1", keep_mask(part, 11, 0.1, (6, 4096), 0, device)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        yield f"dropout, {dtype}", dropout(part, 13, 0, torch.ones(6, 999, dtype=dtype, device=device), 0.25, True)


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Compare every value with the CPU's, bit by bit; runs in one worker."""
    host, rows = torch.device("cpu"), []
    for values in (integer_operations, keyed_values):
        for (name, own), (_, plain) in zip(values(device), values(host), strict=True):
            equal = digest(own) == digest(plain)
            rows.append(Row("dropout", name, {"numbers": own.numel(), "equal bits": equal}, equal))
    part = SampleSlice(6, first=2, batch=16, step=3, seed=7)
    own, plain = (normal(part, 5, (6, 4096), 0, each).cpu() for each in (device, host))
    # Logarithm and cosine are each device's own: equal to rounding.
    far = float((own - plain).abs().max())
    rows.append(Row("dropout", "normal numbers", {"numbers": own.numel(), "difference": far}, far < 1e-5))
    return rows
