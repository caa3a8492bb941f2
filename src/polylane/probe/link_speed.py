"""Link speed: time collectives and messages of many sizes between workers, over the transport that a plan will use."""

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
from polylane.probe.stopwatch import run_small_operators
from polylane.profiling.time_operators import wait_for
from polylane.runtime.span_clock import CollectiveWaits
from polylane.runtime.tensor_parallel import TransportAxis
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World

COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FEWEST, MOST = 3, 20  # timed runs in a round
ITEM = 4  # bytes of a float32 element


@dataclass(frozen=True)
class TrafficCase:
    """One kind and size of traffic.

    Attributes:
        kind: name of a collective, or "send".
        size: bytes of the full (unsharded) value, or of a message.
        ranks: number of ranks in the group.
        groups: number of such groups that communicate at the same time.
    """

    kind: Kind
    size: int
    ranks: int
    groups: int


@dataclass(frozen=True)
class TimedTraffic(TrafficCase):
    """A traffic case with its measured seconds.

    Attributes:
        seconds: from its start until the slowest rank has the result.
        cpu: cores that it kept busy at each end.
    """

    seconds: float
    cpu: float


def group_arrangements(workers: int) -> list[tuple[int, int]]:
    """Return (ranks of a group, groups at once) pairs: two ranks alone, all in pairs, and all as one group."""
    arrangements = [(2, 1), (2, workers // 2), (workers, 1)]
    return [pair for pair in dict.fromkeys(arrangements) if pair[0] <= workers and pair[1] > 0]


def summing_groups(workers: int) -> list[int]:
    """Return the sizes of groups in which all workers sum between computations: pairs, and everyone."""
    return sorted({size for size in (2, workers) if workers >= size > 1 and workers % size == 0})


def kinds_of(ranks: int) -> tuple[Kind, ...]:
    """Return the kinds measured in groups of this size: collectives, and messages between two."""
    return (*COLLECTIVES, "send") if ranks == 2 else COLLECTIVES


def measure_traffic(
    world: World,
    sizes: Sequence[int],
    budget: float,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
    members: Sequence[int] | None = None,
    arrangements: Sequence[tuple[int, int]] | None = None,
) -> list[TimedTraffic]:
    """Time all kinds of traffic in rounds (collective call); all workers get the seconds of the slowest.

    Args:
        world: this worker's place among all workers.
        sizes: sizes in bytes of messages and collectives.
        budget: seconds for each size of each kind in each round.
        rounds: number of times everything is measured.
        tick: progress callback, called after each measurement.
        members: ranks that communicate, groups being neighbours in this order; None: all of the world.
        arrangements: (ranks of a group, groups at once) pairs; None: :func:`group_arrangements` of the members.
    """
    members = range(world.size) if members is None else members
    sorts = [
        TrafficCase(kind, size, degree, count)
        for degree, count in (group_arrangements(len(members)) if arrangements is None else arrangements)
        for kind in kinds_of(degree)
        for size in sizes
    ]
    groups = {_group(sort, rank, members) for sort in sorts for rank in members} | {tuple(range(world.size))}
    pairs = [(a, b) for a in members for b in members if a != b]
    transport = choose_transport(world)(
        world, pairs, sorted(group for group in groups if group), tag=3, own_groups=True
    )
    runs = [list[_Run]() for _ in sorts]
    for _ in range(rounds):
        for index, sort in enumerate(sorts):
            runs[index] += _time_traffic(transport, world, sort, _group(sort, world.rank, members), budget)
            tick()
    local_means = [_mean_run(sort, case_runs) for sort, case_runs in zip(sorts, runs, strict=True)]
    all_means = list(zip(*transport.all_gather_object(local_means), strict=True))
    transport.barrier()  # no worker closes a group that another one still uses
    transport.close()
    return [
        TimedTraffic(sort.kind, sort.size, sort.ranks, sort.groups, max(s for s, _ in means), max(c for _, c in means))
        for sort, means in zip(sorts, all_means, strict=True)
    ]


def _group(sort: TrafficCase, rank: int, members: Sequence[int]) -> tuple[int, ...]:
    """Return the group of a rank among the members; empty if the rank takes no part."""
    position = members.index(rank) if rank in members else len(members)
    start = position // sort.ranks * sort.ranks
    return tuple(members[start : start + sort.ranks]) if position < sort.ranks * sort.groups else ()


# Wall-clock seconds of a run, and CPU seconds of this process in it.
_Run = tuple[float, float]


def _time_traffic(
    transport: Transport, world: World, sort: TrafficCase, group: tuple[int, ...], budget: float
) -> list[_Run]:
    """Time as many runs as the budget allows; ranks without a group wait at the barrier."""
    run = _make_run(transport, world, sort, group) if group else None
    warm_up_run = max(_time_run(run, world) for _ in range(2))  # warm-up: connections and buffers are made
    # All ranks must do the same number of runs, so the slowest decides.
    slowest = max(transport.all_gather_object(warm_up_run[0]))
    count = int(min(max(budget / max(slowest, 1e-6), FEWEST), MOST))
    transport.barrier()
    return [_time_run(run, world) for _ in range(count)]


def _mean_run(sort: TrafficCase, runs: Sequence[_Run]) -> tuple[float, float]:
    """Return the mean seconds of a run, and the mean number of cores that it kept busy.

    A message may have to wait until its receiver is scheduled on a core, which in a few of ten cases takes ten times as
    long as the rest. A step sends many messages, so the mean counts, not the median.
    """
    seconds, computing = (statistics.mean(values) for values in zip(*runs, strict=True))
    return seconds / (2 if sort.kind == "send" else 1), computing / max(seconds, 1e-9)  # a ping-pong is two messages


def _time_run(run: Callable[[], Any] | None, world: World) -> _Run:
    if run is None:
        return 0.0, 0.0
    # As in a step, where computations come before a message and leave their traces in caches.
    run_small_operators(world.device)
    start, computing = time.perf_counter(), time.process_time()
    run()
    wait_for(world.device)()
    return time.perf_counter() - start, time.process_time() - computing


def _make_run(transport: Transport, world: World, sort: TrafficCase, group: tuple[int, ...]) -> Callable[[], Any]:
    """Return the function that runs one rank's part of a measurement."""
    if sort.kind == "send":
        return _ping_pong(transport, world, sort.size, group)
    axis, degree = TransportAxis(group, transport, CollectiveWaits()), len(group)
    side = max(degree, round((sort.size / ITEM) ** 0.5 / degree) * degree)
    rows, columns = Shard(0, even_cuts(side, degree)), Shard(1, even_cuts(side, degree))
    # Each collective is the redistribution that the runtime performs by it.
    placements: dict[str, tuple[Placement, Placement]] = {
        "all_reduce": (PARTIAL, REPLICATE),
        "all_gather": (rows, REPLICATE),
        "reduce_scatter": (PARTIAL, rows),
        "all_to_all": (rows, columns),
    }
    source, target = placements[sort.kind]
    tensor = torch.ones(side // degree if source == rows else side, side, device=world.device)
    return lambda: redistribute(axis, tensor, source, target)


def _ping_pong(transport: Transport, world: World, size: int, group: tuple[int, ...]) -> Callable[[], Any]:
    value = torch.ones(max(size // ITEM, 1), device=world.device)
    is_first = world.rank == group[0]
    peer = group[1] if is_first else group[0]

    def run() -> Tensor:
        coming = transport.receive(value.shape, value.dtype, peer)  # posted before the send, as the runtime does
        if not is_first:
            coming.wait()
        going = transport.send(value, peer)
        if is_first:
            coming.wait()
        return going.wait()

    return run
