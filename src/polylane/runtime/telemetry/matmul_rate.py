"""Matmul rate: floating-point operations that a device does in a second, measured by one product of matrices."""

from __future__ import annotations

import time

import torch

SIZE = 512  # rows and columns, on the host
ACCELERATOR_SIZE = 4096
TRIALS = 4  # the fastest counts: what else the machine does makes it slower


def measure_matmul_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations of a large product per second, on a device that has nothing else to do.

    On the host it takes some 30 ms on one thread.

    Args:
        device: where the product is computed.
        dtype: that both factors have.
    """
    size = SIZE if device.type == "cpu" else ACCELERATOR_SIZE
    factors = torch.ones(2, size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(1 + TRIALS):  # the first one loads the kernel
        _wait_for(device)
        begin = time.perf_counter()
        torch.matmul(factors[0], factors[1])
        _wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return float(2 * size**3 / best)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
