"""Keyed random numbers: the same bits on every device, by operators and by the one kernel; and their time."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setting import Row, Setting
from benchmarks.gpu.speed import time_in_turns
from polylane.graph.nodes.sample_slice import SampleSlice, TensorRegion
from polylane.graph.operators import device_draws
from polylane.graph.operators.counter_rng import keep_mask, normal, random_bits, uniform
from polylane.graph.operators.keyed_random import attention, dropout

EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 0x7FEB352D, 0x846CA68B - (1 << 32), 12345)

# Of torch's own: the mask is kept in both, and the mixer of the bits is as long as torch's.
OF_TORCHS = 1.5


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
    region = TensorRegion(((0, 6, ((1, 4),)), (1, 70, ((0, 9), (40, 70))), (2, 33, ((2, 30),))))
    yield "bits of a region", random_bits(SampleSlice(6, 2**27, 2**28, region=region), 5, (3, 39, 28), 0, device)
    yield "mask of 0.1", keep_mask(part, 11, 0.1, (6, 4096), 0, device)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        yield f"dropout, {dtype}", dropout(part, 13, 0, torch.ones(6, 999, dtype=dtype, device=device), 0.25, True)

        second = torch.linspace(-1, 1, 70 * 6 * 33, device=device).to(dtype).view(70, 6, 33)
        yield f"dropout, samples second, {dtype}", dropout(part, 13, 1, second, 0.25, True)


def by_operators() -> AbstractContextManager[Any]:
    """Return a context in which no kernel draws."""
    return patch.object(device_draws, "find_kernel", lambda device: None)


def measure_time(setting: Setting, device: torch.device) -> Iterator[Row]:
    """Time dropout, and attention with it, forward and backward, beside torch's own and beside the operators'."""
    small = setting.quick or device.type == "cpu"
    size, heads = ((2, 64, 64), (1, 2, 64, 8)) if small else ((8, 1024, 4096), (8, 16, 1024, 64))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(size, dtype=dtype, device=device, requires_grad=True)
    q = torch.randn(heads, dtype=dtype, device=device, requires_grad=True)
    part = SampleSlice(size[0], batch=size[0])
    subjects: dict[str, tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]]] = {
        "dropout": (x, lambda: F.dropout(x, 0.1), lambda: dropout(part, 5, 0, x, 0.1, True)),
        "attention": (
            q,
            lambda: F.scaled_dot_product_attention(q, q, q, None, 0.1, True),
            lambda: attention(part, 5, 0, q, q, q, None, 0.1, True),
        ),
    }
    for subject, (tensor, torchs, keyed) in subjects.items():

        def run(call: Callable[[], Tensor], context: Callable[[], Any], tensor: Tensor = tensor) -> None:
            with context():
                out = call()
                torch.autograd.grad(out, tensor, out.detach())

        contenders = {
            "torch's own": (torchs, nullcontext),
            "by key": (keyed, nullcontext),
            "by operators": (keyed, by_operators),
        }
        steps = {name: partial(run, *contender) for name, contender in contenders.items()}
        seconds = time_in_turns(steps, device, 1 if setting.quick else 5, 2 if small else 20)
        for name in contenders:
            columns: dict[str, Any] = {
                "ms": seconds[name] * 1e3,
                "of torch's own": seconds[name] / seconds["torch's own"],
            }
            if device.type == "cuda" and not small:
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                steps[name]()
                columns["MiB"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
            judged = (subject, name) == ("dropout", "by key") and not small
            yield Row(
                "dropout", f"{subject}, {name}", columns, columns["of torch's own"] <= OF_TORCHS if judged else None
            )


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Compare every value with the CPU's, bit by bit; runs in one worker."""
    host, rows = torch.device("cpu"), []
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        rows.append(Row("dropout", "one kernel is used", {}, device_draws.find_kernel(device) is not None))
    for values, context, suffix in (
        (integer_operations, nullcontext, ""),
        (keyed_values, nullcontext, ""),
        (keyed_values, by_operators, ", by operators"),
    ):
        with context():
            drawn = list(values(device))
        for (name, own), (_, plain) in zip(drawn, values(host), strict=True):
            equal = digest(own) == digest(plain)
            rows.append(Row("dropout", name + suffix, {"numbers": own.numel(), "equal bits": equal}, equal))
    part = SampleSlice(6, first=2, batch=16, step=3, seed=7)
    own, plain = (normal(part, 5, (6, 4096), 0, each).cpu() for each in (device, host))
    # Logarithm and cosine are each device's own: equal to rounding.
    far = float((own - plain).abs().max())
    rows.append(Row("dropout", "normal numbers", {"numbers": own.numel(), "difference": far}, far < 1e-5))
    return [*rows, *measure_time(setting, device)]
