"""Measure what workers send each other: collectives and messages of many sizes, by the runtime's own ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.cluster.link import Kind
from polylane.placement.placement import PARTIAL, REPLICATE, Placement, Shard, even_cuts
from polylane.placement.redistribute import redistribute
from polylane.probe.stopwatch import run_small_operators, synchronizer_of
from polylane.runtime.tensor_parallel import CollectiveWaits, TransportAxis
from polylane.runtime.transport.c10d import C10dTransport
from polylane.runtime.workers.world import World

COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FEWEST, MOST = 3, 20  # runs in a round
ITEM = 4  # bytes of an element


@dataclass(frozen=True)
class TimedTraffic:
    """What was measured of one kind of traffic.

    Attributes:
        kind: a collective, or "send".
        size: of the whole value in bytes, as it is where all its parts are together; of a message.
        ranks: of the group.
        groups: how many such groups were at work at the same time.
        seconds: from its start until all have it.
        cpu: cores that it kept busy at each end meanwhile.
    """

    kind: Kind
    size: int
    ranks: int
    groups: int
    seconds: float
    cpu: float


def group_arrangements(workers: int) -> list[tuple[int, int]]:
    """(ranks of a group, groups at once): two ranks alone, all by twos, and all as one group."""
    found = [(2, 1), (2, workers // 2), (workers, 1)]
    return [each for each in dict.fromkeys(found) if each[0] <= workers and each[1] > 0]


def kinds_of(ranks: int) -> tuple[Kind, ...]:
    """What is measured in groups of so many: collectives, and between two also messages."""
    return (*COLLECTIVES, "send") if ranks == 2 else COLLECTIVES


@dataclass(frozen=True)
class _TrafficKind:
    """What is measured: a kind in groups of so many, so many groups at once, over so many bytes."""

    kind: Kind
    size: int
    ranks: int
    groups: int


def measure_traffic(
    world: World, sizes: Sequence[int], budget: float, rounds: int, told: Callable[[], Any] = lambda: None
) -> list[TimedTraffic]:
    """Measure all kinds of traffic, in rounds; all workers call it together, and all get what the slowest of them saw.

    Args:
        sizes: bytes.
        budget: seconds for each size of each kind in each round.
        told: called after each.
    """
    ranks = range(world.size)
    sorts = [
        _TrafficKind(kind, size, degree, count)
        for degree, count in group_arrangements(world.size)
        for kind in kinds_of(degree)
        for size in sizes
    ]
    groups = {_group(sort, rank) for sort in sorts for rank in ranks} | {tuple(ranks)}
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    transport = C10dTransport(world, pairs, sorted(group for group in groups if group), tag=3, own_groups=True)
    runs = [list[_Run]() for _ in sorts]
    for _ in range(rounds):
        for index, sort in enumerate(sorts):
            runs[index] += _time_traffic(transport, world, sort, budget)
            told()
    own = [_mean_run(sort, each) for sort, each in zip(sorts, runs, strict=True)]
    every = list(zip(*transport.all_gather_object(own), strict=True))
    transport.barrier()  # nobody ends a group in which another one still talks
    transport.close()
    return [
        TimedTraffic(sort.kind, sort.size, sort.ranks, sort.groups, max(s for s, _ in seen), max(c for _, c in seen))
        for sort, seen in zip(sorts, every, strict=True)
    ]


def _group(sort: _TrafficKind, rank: int) -> tuple[int, ...]:
    """The group in which a rank takes part; empty where it does not."""
    first = rank // sort.ranks * sort.ranks
    return tuple(range(first, first + sort.ranks)) if rank < sort.ranks * sort.groups else ()


# Seconds of a run, and those in which this process computed meanwhile.
_Run = tuple[float, float]


def _time_traffic(transport: C10dTransport, world: World, sort: _TrafficKind, budget: float) -> list[_Run]:
    """As many runs as there is time for; ranks without a group wait."""
    group = _group(sort, world.rank)
    run = _make_run(transport, world, sort, group) if group else None
    first = max(_time_run(run, world) for _ in range(2))  # connections are made, and buffers
    slowest = max(transport.all_gather_object(first[0]))
    count = int(min(max(budget / max(slowest, 1e-6), FEWEST), MOST))
    transport.barrier()
    return [_time_run(run, world) for _ in range(count)]


def _mean_run(sort: _TrafficKind, runs: Sequence[_Run]) -> tuple[float, float]:
    """Seconds, and cores kept busy meanwhile, on average.

    A message may have to wait until the system lets its receiver have a core: a few times out of ten that takes ten
    times as long as all else. In the course of a step so many are sent that the mean counts, not what is usual.
    """
    seconds, computing = (statistics.mean(each) for each in zip(*runs, strict=True))
    return seconds / (2 if sort.kind == "send" else 1), computing / max(seconds, 1e-9)  # a message goes there and back


def _time_run(run: Callable[[], Any] | None, world: World) -> _Run:
    if run is None:
        return 0.0, 0.0
    run_small_operators(
        world.device
    )  # in a step messages come between computations, and find caches and cores as these leave them
    start, computing = time.perf_counter(), time.process_time()
    run()
    synchronizer_of(world.device)()
    return time.perf_counter() - start, time.process_time() - computing


def _make_run(transport: C10dTransport, world: World, sort: _TrafficKind, group: tuple[int, ...]) -> Callable[[], Any]:
    """What one rank does of one run."""
    if sort.kind == "send":
        return _ping_pong(transport, world, sort.size, group)
    axis, degree = TransportAxis(group, transport, CollectiveWaits()), len(group)
    side = max(degree, round((sort.size / ITEM) ** 0.5 / degree) * degree)
    rows, columns = Shard(0, even_cuts(side, degree)), Shard(1, even_cuts(side, degree))
    ways: dict[str, tuple[Placement, Placement]] = {
        "all_reduce": (PARTIAL, REPLICATE),
        "all_gather": (rows, REPLICATE),
        "reduce_scatter": (PARTIAL, rows),
        "all_to_all": (rows, columns),
    }
    source, target = ways[sort.kind]
    own = torch.ones(side // degree if source == rows else side, side, device=world.device)
    return lambda: redistribute(axis, own, source, target)


def _ping_pong(transport: C10dTransport, world: World, size: int, group: tuple[int, ...]) -> Callable[[], Any]:
    value = torch.ones(max(size // ITEM, 1), device=world.device)
    first = world.rank == group[0]
    peer = group[1] if first else group[0]

    def run() -> Tensor:
        coming = transport.receive(value.shape, value.dtype, peer)  # asked for ahead, as the runtime does
        if not first:
            coming.wait()
        going = transport.send(value, peer)
        if first:
            coming.wait()
        return going.wait()

    return run
