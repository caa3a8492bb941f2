"""Host contention: how much workers of a host slow each other when they compute at once, cores aside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polylane.probe.effort import Effort, concurrent_counts
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.workers.world import World

# A block of a small transformer: matmuls, and operators that only move bytes.
SAMPLES, LENGTH, HIDDEN, HEADS = 8, 64, 256, 4
FEWEST = 3  # timed passes of a worker at least, after one warm-up


def measure_contention(world: World, effort: Effort, tick: Callable[[], Any]) -> dict[int, float]:
    """Measure the speed of each of several concurrent workers relative to one alone (collective call).

    CPU time is measured, not wall-clock time: so the figures show contention for memory, however many cores there are.
    All workers get the same result.

    Args:
        world: this worker's place among all workers.
        effort: seconds for each number of concurrent workers, and rounds.
        tick: progress callback, called after each count of each round.
    """
    transport, step, counts = choose_transport(world)(world, [], []), _make_block(), concurrent_counts(world.size)
    times: dict[int, list[float]] = {count: [] for count in (1, *counts)}
    for _ in range(effort.rounds):
        for count in times:
            # All workers start at once; those beyond the count wait in the gather below.
            transport.barrier()
            seconds = _median_pass_seconds(step, effort.contention_seconds) if world.rank < count else 0.0
            all_seconds = [value for value in transport.all_gather_object(seconds) if value]
            times[count].append(statistics.mean(all_seconds))
            tick()
    transport.barrier()
    transport.close()
    typical = {count: statistics.median(values) for count, values in times.items()}
    return {count: min(1.0, typical[1] / typical[count]) for count in counts}


def _median_pass_seconds(step: Callable[[], Any], seconds: float) -> float:
    """Return the median CPU seconds of a worker's pass, over ``seconds`` of wall-clock time."""
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) <= FEWEST or time.perf_counter() < end:
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return statistics.median(times[1:])


def _make_block() -> Callable[[], Any]:
    """Return a function that runs the block forward and backward on the CPU."""
    x = torch.randn(SAMPLES, LENGTH, HIDDEN, requires_grad=True)
    shapes = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
    weights = [(torch.randn(shape) / shape[1] ** 0.5).requires_grad_() for shape in shapes]

    def step() -> tuple[Tensor, ...]:
        mixed = F.linear(F.layer_norm(x, [HIDDEN]), weights[0])
        query, key, value = mixed.view(SAMPLES, LENGTH, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + F.linear(attention.transpose(1, 2).reshape(SAMPLES, LENGTH, HIDDEN), weights[1])
        y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, [HIDDEN]), weights[2])), weights[3])
        return torch.autograd.grad(y.sum(), [x, *weights])

    return step
