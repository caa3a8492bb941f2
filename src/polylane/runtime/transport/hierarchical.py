"""Hierarchical transport over hosts of several CPU workers: shared memory inside a host, torch.distributed between.

A sum over several hosts climbs and descends: inside each host every worker gets the sum of one part (reduce-scatter),
the workers that have the same part on all hosts sum it over the network, and inside each host the parts are joined
again (all-gather). Over the network goes each byte once for each host, not once for each worker (as in Goyal et al.
2017, section 4). Where hosts have different numbers of workers in a group, the first of each has the whole as its part.

These three steps are taken by a thread of their own, in the order in which the sums were asked for: whatever this
worker's own thread is waiting for, inside its host or beyond, the sums go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.transport import c10d, shared_memory
from polylane.runtime.transport.hub import Hub
from polylane.runtime.transport.in_turn import InTurn
from polylane.runtime.transport.protocol import (
    Counters,
    Deferred,
    Done,
    Outcome,
    Pending,
    as_sent,
    copy_back,
    normalised,
    require_summable,
)
from polylane.runtime.transport.rendezvous import met_again
from polylane.runtime.world import World

Channel = tuple[int, int]  # (sender, receiver)


@dataclass(frozen=True)
class Climb:
    """How a group sums over hosts, as one of its workers sees it.

    Attributes:
        here: its workers on this host.
        index: of this worker among them.
        across: those that have the same part as this one, one of each host; empty where this one has none.
        even: every worker of a host has a part; otherwise the first has the whole.
    """

    here: tuple[int, ...]
    index: int
    across: tuple[int, ...]
    even: bool

    def sizes(self, elements: int) -> list[int]:
        """The elements of the part of each worker of this host."""
        count = len(self.here)
        if not self.even:
            return [elements] + [0] * (count - 1)
        return [elements * (i + 1) // count - elements * i // count for i in range(count)]

    def wire(self, elements: int, item: int) -> int:
        """Bytes that this worker sends in a sum: two steps inside the host, and a ring between hosts.

        Args:
            elements: of the whole tensor.
            item: bytes of one element.
        """
        sizes = self.sizes(elements)
        own, hosts = sizes[self.index], max(len(self.across), 1)
        inside = elements - own + own * (len(self.here) - 1)
        return inside * item + 2 * own * item * (hosts - 1) // hosts


def by_host(members: Iterable[int], hosts: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """A group's ranks, host by host."""
    found: dict[Hashable, list[int]] = {}
    for rank in sorted(members):
        found.setdefault(hosts[rank], []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def rings(parts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups between hosts: of the workers with the same part, or of the first of each host."""
    if len({len(part) for part in parts}) == 1:
        return list(zip(*parts, strict=True))
    return [tuple(part[0] for part in parts)]


class Transport:
    """The workers of several hosts; the interface is :class:`~.protocol.Transport`.

    Arguments: see :class:`.shared_memory.Transport`, and

    Args:
        hosts: of every rank; equal for those that the hub connects.
    """

    def __init__(
        self,
        hub: Hub,
        hosts: Sequence[Hashable],
        world: World,
        channels: Iterable[Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
    ) -> None:
        self.rank, self.size = world.rank, world.size
        self.counters = Counters()
        channels = list(dict.fromkeys(channels))
        named = list(dict.fromkeys(normalised(group, world.size) for group in groups))
        parts = {members: by_host(members, hosts) for members in named}
        inside = [members for members in named if len(parts[members]) == 1]
        beyond = [members for members in named if len(parts[members]) > 1]
        known = set(range(world.size))
        near = [(a, b) for a, b in channels if {a, b} <= known and hosts[a] == hosts[b]]
        far = [pair for pair in channels if pair not in set(near)]
        self._climbs = {each: _climb(world.rank, parts[each]) for each in beyond if world.rank in each}
        steps = [part for members in beyond for part in parts[members] if len(part) > 1]
        across = [ring for members in beyond for ring in rings(parts[members])]
        # What the caller asks for directly, then what the sums' own thread uses.
        self._near = shared_memory.Transport(hub, world, near, inside)
        self._far: c10d.Transport = c10d.Transport(world, far, beyond, tag, own_groups)
        self._near.counters = self._far.counters = self.counters
        self._steps = shared_memory.Transport(hub, world, (), steps)
        self._across = c10d.Transport(world, (), across, tag, own_groups=True)
        self._thread = InTurn("polylane-sums")
        self._peers = {peer for pair in near if world.rank in pair for peer in pair} - {world.rank}

    def send(self, tensor: Tensor, peer: int) -> Pending:
        return (self._near if peer in self._peers else self._far).send(tensor, peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        return (self._near if peer in self._peers else self._far).receive(shape, dtype, peer)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> Pending:
        members = normalised(ranks, self.size)
        climb = self._climbs.get(members)
        if climb is None:
            return self._of(members).all_reduce(tensor, members)
        require_summable(tensor)
        if tensor.numel() == 0:
            return Done(tensor)
        wire = as_sent(tensor)
        self.counters.put("all_reduce", wire, climb.wire(wire.numel(), wire.element_size()))
        return _Climbing(self._thread.submit(self._sum, wire.view(-1), climb), wire, tensor.detach())

    def _sum(self, wire: Tensor, climb: Climb) -> None:
        """The three steps, in place."""
        sizes, alone = climb.sizes(wire.numel()), len(climb.here) == 1
        part = wire if alone else self._steps.reduce_scatter(wire, climb.here, sizes).wait()
        if part.numel():
            self._across.all_reduce(part, climb.across).wait()
        if not alone:
            wire.copy_(self._steps.all_gather(part, climb.here, sizes).wait())

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> Pending:
        return self._of(ranks).all_gather(tensor, ranks, sizes)

    def reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> Pending:
        return self._of(ranks).reduce_scatter(tensor, ranks, sizes)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> Pending:
        return self._of(ranks := tuple(ranks)).broadcast(tensor, source, ranks)

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> Outcome[list[Tensor]]:
        return self._of(ranks).all_to_all(pieces, shapes, ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._far.all_gather_object(value)

    def gather_object(self, value: Any, destination: int) -> list[Any] | None:
        return self._far.gather_object(value, destination)

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self._far.broadcast_object(value, source)

    def barrier(self) -> None:
        self._far.barrier()

    def close(self) -> None:
        self._thread.close()
        for transport in (self._steps, self._near, self._across, self._far):
            transport.close()

    def _of(self, ranks: Iterable[int]) -> shared_memory.Transport | c10d.Transport:
        """What carries the collectives of a group as they are."""
        return self._far if normalised(ranks, self.size) in self._climbs else self._near


class _Climbing(Deferred[Tensor]):
    """A sum over hosts, under way in the sums' own thread.

    Args:
        future: of the thread's call, which leaves the sum in ``wire``.
        wire: this worker's values, contiguous.
        target: the caller's tensor, which gets the sum too where it has other memory.
    """

    __slots__ = ("_future", "_target", "_wire")

    def __init__(self, future: Future[None], wire: Tensor, target: Tensor) -> None:
        super().__init__()
        self._future, self._wire, self._target = future, wire, target

    def _finish(self) -> Tensor:
        self._future.result()
        return copy_back(self._wire, self._target)


class Hierarchical:
    """Makes transports over shared memory inside each host, all over the same connections; see :class:`Transport`.

    Args:
        world: this worker among all, as it was when the hub was made.
        hub: connections of this worker to the others of its host.
        hosts: the host of every rank; where they are all equal, nothing goes over the network.
    """

    def __init__(self, world: World, hub: Hub, hosts: Sequence[Hashable]) -> None:
        self._world, self._hub, self._hosts = world, hub, hosts

    def __call__(
        self,
        world: World,
        channels: Iterable[Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
    ) -> Transport | shared_memory.Transport:
        """See :class:`.c10d.Transport`.

        Raises:
            PolylaneError: the transports of before have been closed, and the workers of a host do not find one another
                again.
        """
        if self._hub.closed:  # with the last transport: all workers made and closed the same ones
            self._hub = met_again(self._world, self._hosts)
        if len(set(self._hosts)) == 1:
            return shared_memory.Transport(self._hub, world, channels, groups, tag, own_groups)
        return Transport(self._hub, self._hosts, world, channels, groups, tag, own_groups)


def _climb(rank: int, parts: Sequence[tuple[int, ...]]) -> Climb:
    here = next(part for part in parts if rank in part)
    across = next((ring for ring in rings(parts) if rank in ring), ())
    return Climb(here, here.index(rank), across, len({len(part) for part in parts}) == 1)
