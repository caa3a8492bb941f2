"""Interleaved sums: by how much a small all-reduce between two computations delays the workers that take part.

An all-reduce by itself takes some microseconds over shared memory. Between computations it takes longer: caches are
full of something else, a worker that has waited for long sleeps and must be woken up, the last one decides when all go
on, and where workers share a core, whoever has one keeps it for a while. So two loops are timed, in turns, by all
workers at once: one computes, the other computes the same and sums in between; the difference is the delay of a sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polylane.probe.effort import Effort
from polylane.probe.link_speed import summing_groups
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World

# A convolution and what follows it: a fraction of a millisecond, as between two normalizations of a small network.
IMAGES, CHANNELS, SIDE = 8, 32, 28
BETWEEN = 2  # convolutions between two sums
SUMMED = 2 * CHANNELS + 1  # float64 numbers: the statistics of a normalization
FEWEST = 8  # sums of a loop at least

Act = Callable[[], Any]


def measure_interleaved_sums(world: World, effort: Effort, tick: Act = lambda: None) -> dict[int, float]:
    """Return the seconds by which a small sum between computations delays workers, by ranks of a group (collective).

    All workers of the world sum at the same time, in pairs and as one group.

    Args:
        world: this worker's place among all workers.
        effort: seconds of a loop, and number of times that each is run.
        tick: progress callback, called after each round of each size of groups.
    """
    groups = {size: _own_group(size, world.rank) for size in summing_groups(world.size)}
    all_groups = sorted({_own_group(size, rank) for size in groups for rank in range(world.size)})
    transport = choose_transport(world)(world, [], all_groups)
    compute, summand = make_computation(), torch.zeros(SUMMED, dtype=torch.float64)
    count = _count_sums(transport, compute, effort.sums_seconds)
    delays: dict[int, list[float]] = {size: [] for size in groups}
    for _ in range(effort.rounds * effort.sums_rounds):
        for size, group in groups.items():

            def add_up(group: tuple[int, ...] = group) -> None:
                transport.all_reduce(summand, group).wait()

            delays[size].append(time_delay(compute, add_up, count, transport.barrier))
            tick()
    # Noise makes a loop slower, with sums or without: the median of the differences, the same for all workers.
    typical = transport.all_gather_object({size: statistics.median(values) for size, values in delays.items()})
    transport.barrier()
    transport.close()
    return {size: max(0.0, *(float(medians[size]) for medians in typical)) for size in groups}


def _own_group(size: int, rank: int) -> tuple[int, ...]:
    start = rank // size * size
    return tuple(range(start, start + size))


def time_delay(
    compute: Act, add_up: Act, count: int, barrier: Act, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds by which each of ``count`` sums delays computations, on this worker.

    Args:
        compute: what a worker does between two sums.
        add_up: takes part in a sum.
        count: number of computations in a loop, each followed by a sum in the second loop.
        barrier: waits for the other workers, so that all begin a loop together and the slowest decides when it ends.
        clock: seconds; real ones by default.
    """

    def loop(*acts: Act) -> float:
        barrier()
        start = clock()
        for _ in range(count):
            for act in acts:
                act()
        barrier()
        return clock() - start

    plain = loop(compute)
    return (loop(compute, add_up) - plain) / count


def _count_sums(transport: Transport, compute: Act, budget: float) -> int:
    """Return as many sums as computations fit into ``budget`` seconds, the same number for all workers."""
    compute()
    start = time.perf_counter()
    for _ in range(FEWEST):
        compute()
    slowest = max(transport.all_gather_object((time.perf_counter() - start) / FEWEST))
    return max(FEWEST, int(budget / max(slowest, 1e-6)))


def make_computation() -> Act:
    """Return a function that computes about as long as a network does between two of its normalizations."""
    x, weight = torch.randn(IMAGES, CHANNELS, SIDE, SIDE), torch.randn(CHANNELS, CHANNELS, 3, 3) / CHANNELS

    def compute() -> None:
        y = x
        for _ in range(BETWEEN):
            y = F.conv2d(y, weight, padding=1).relu_()
        torch.var_mean(y, (0, 2, 3))

    return compute
