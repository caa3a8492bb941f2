"""Codec speed: bytes of gradients per second that a device compresses and decompresses, for every compressor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from polylane.cost.network.compressed_reduction import MEASURED_FRACTION, MEASURED_RANK
from polylane.probe.stopwatch import stopwatch
from polylane.runtime.sync.compression.compressor import BucketGradients, GradientCompressor
from polylane.runtime.sync.compression.half_precision import HalfPrecisionCompressor
from polylane.runtime.sync.compression.powersgd import PowerSGDCompressor
from polylane.runtime.sync.compression.top_k import TopKCompressor
from polylane.runtime.transport.protocol import FinishedTransfer, Transport

# A gradient of 4 MB, as large as a bucket; the first runs make residuals and directions, and do not count.
ROWS, COLUMNS = 1024, 1024
# Measured runs: at least and at most; and how many come before, uncounted.
FEWEST, MOST, LEAD = 3, 15, 2
RANKS = (0, 1)


class EchoTransport:
    """Transport between two ranks of which the other always sends the same: messages take no time but copies."""

    rank, size = 0, len(RANKS)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> FinishedTransfer[Tensor]:
        """Return the sum of as many equal vectors as there are ranks."""
        return FinishedTransfer(tensor.mul_(len(tuple(ranks))))

    def all_gather(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> FinishedTransfer[Tensor]:
        """Return the vector once for every rank."""
        return FinishedTransfer(tensor.repeat(len(ranks)))


def measure_codecs(device: torch.device, budget: float) -> dict[str, float]:
    """Return the bytes of a float32 gradient per second that every compressor takes in both directions.

    Args:
        device: the device on which the gradients are.
        budget: seconds for each of them.
    """
    codecs: dict[str, GradientCompressor] = {
        "bfloat16": HalfPrecisionCompressor(torch.bfloat16),
        "float16": HalfPrecisionCompressor(torch.float16),
        "powersgd": PowerSGDCompressor(MEASURED_RANK),
        "top_k": TopKCompressor(MEASURED_FRACTION),
    }
    return {name: 4 * ROWS * COLUMNS / _median_seconds(codec, device, budget) for name, codec in codecs.items()}


def _median_seconds(compressor: GradientCompressor, device: torch.device, budget: float) -> float:
    """Return the median time of a reduction without its messages."""
    watch, times = stopwatch(device), list[float]()
    gradient = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(device)
    transport = cast(Transport, EchoTransport())

    def reduce() -> Any:
        shares = BucketGradients(RANKS, ("weight",), (gradient.clone(),), (), gradient.new_zeros(0))
        compressor.begin_step()
        pending = compressor.launch_sum(shares, transport)
        pending.start_next_round()
        return pending.wait()

    end = time.perf_counter() + budget
    while len(times) < LEAD + FEWEST or (len(times) < LEAD + MOST and time.perf_counter() < end):
        times.append(watch(reduce)[0])
    return statistics.median(times[LEAD:])
