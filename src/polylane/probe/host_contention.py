"""Measure what workers of a host slow each other by that compute at the same time, cores aside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.workers.world import World

# A block of a small transformer: matmuls, and operators that only move bytes.
SAMPLES, LENGTH, HIDDEN, HEADS = 8, 64, 256, 4
FEWEST = 3  # passes of a worker


def measure_contention(
    world: World, counts: Sequence[int], seconds: float, rounds: int, told: Callable[[], Any] = lambda: None
) -> dict[int, float]:
    """How fast each of so many workers is that compute at once, in parts of the speed of one alone.

    Counted is the time in which a worker has a core: so what is seen is the memory that they share, however many cores
    there are. All workers call it together; all get the same.

    Args:
        counts: how many compute at once.
        seconds: for each count in each round.
        told: called after each.
    """
    transport, step = C10dTransport(world), _make_block()
    found: dict[int, list[float]] = {count: [] for count in (1, *counts)}
    for _ in range(rounds):
        for count in found:
            transport.barrier()
            own = _median_pass_seconds(step, seconds) if world.rank < count else 0.0
            every = [each for each in transport.all_gather_object(own) if each]
            found[count].append(statistics.mean(every))
            told()
    transport.barrier()
    transport.close()
    typical = {count: statistics.median(each) for count, each in found.items()}
    return {count: min(1.0, typical[1] / typical[count]) for count in counts}


def _median_pass_seconds(step: Callable[[], Any], seconds: float) -> float:
    """The median of a worker's computing seconds for a pass, over so many seconds of the wall's clock."""
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) <= FEWEST or time.perf_counter() < end:
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return statistics.median(times[1:])


def _make_block() -> Callable[[], Any]:
    """Forward and backward of the block, on the CPU."""
    x = torch.randn(SAMPLES, LENGTH, HIDDEN, requires_grad=True)
    shapes = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
    weights = [(torch.randn(shape) / shape[1] ** 0.5).requires_grad_() for shape in shapes]

    def step() -> tuple[Tensor, ...]:
        mixed = F.linear(F.layer_norm(x, [HIDDEN]), weights[0])
        query, key, value = mixed.view(SAMPLES, LENGTH, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + F.linear(seen.transpose(1, 2).reshape(SAMPLES, LENGTH, HIDDEN), weights[1])
        y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, [HIDDEN]), weights[2])), weights[3])
        return torch.autograd.grad(y.sum(), [x, *weights])

    return step
