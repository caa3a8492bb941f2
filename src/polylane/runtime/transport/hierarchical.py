"""Hierarchical collectives over hosts of several CPU workers: shared memory inside a host, torch.distributed between.

    collective        inside a host                between workers of one column     inside a host
    all-reduce        reduce-scatter to parts      all-reduce of a part              all-gather of the parts
    reduce-scatter    reduce-scatter to columns    reduce-scatter of a column
    all-gather                                     all-gather of a column            all-gather of the columns
    broadcast                                      broadcast in the source's         broadcast of its member

A column has one worker of each host: the first ones, the second ones, and so on. Each byte goes over the network once
for each host, not once for each worker (as in Goyal et al. 2017, section 4). If hosts have different numbers of workers
in a group, the first worker of each host has everything as its part of an all-reduce, and the other collectives go over
torch.distributed alone; so does all-to-all, whose pieces go over the network once in any case.

A separate thread runs these steps, in the order in which the collectives were started: they proceed whatever this
worker's main thread is waiting for. One thread is enough: the workers of a stage run the same program, and so start
the collectives of all its groups in one order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.transport import c10d, protocol
from polylane.runtime.transport.protocol import Deferred, FinishedTransfer, PendingResult, PendingTransfer
from polylane.runtime.transport.serial_thread import SerialThread
from polylane.runtime.transport.shared_memory import transport as shared_memory
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.rendezvous import reconnect_hub
from polylane.runtime.workers.world import World


@dataclass(frozen=True)
class HostTree:
    """How a group communicates over hosts, from the view of one of its workers.

    Attributes:
        host_ranks: ranks of the group on this host, ascending.
        index: index of this worker in ``host_ranks``.
        cross_ranks: ranks with the same part as this worker, one of each host; empty if this worker has no part.
        is_even: whether every worker of a host has a part; otherwise the first one has everything.
        columns: ranks with the same part, for every part.
    """

    host_ranks: tuple[int, ...]
    index: int
    cross_ranks: tuple[int, ...]
    is_even: bool
    columns: tuple[tuple[int, ...], ...] = ()

    def by_columns(self) -> list[int]:
        """Return all ranks of the group, column after column."""
        return [rank for column in self.columns for rank in column]

    def part_sizes(self, elements: int) -> list[int]:
        """Return the number of elements of the part of each worker of this host."""
        count = len(self.host_ranks)
        if not self.is_even:
            return [elements] + [0] * (count - 1)
        # Parts differ by at most one element.
        return [elements * (i + 1) // count - elements * i // count for i in range(count)]

    def bytes_sent(self, elements: int, item: int) -> int:
        """Return the bytes that this worker sends in a sum: two steps inside the host, and a ring between hosts.

        Args:
            elements: number of elements of the full tensor.
            item: size of one element in bytes.
        """
        sizes = self.part_sizes(elements)
        part_size, hosts = sizes[self.index], max(len(self.cross_ranks), 1)
        host_elements = elements - part_size + part_size * (len(self.host_ranks) - 1)
        return host_elements * item + 2 * part_size * item * (hosts - 1) // hosts


def group_by_host(members: Iterable[int], hosts: Sequence[Hashable]) -> list[tuple[int, ...]]:
    """Return a group's ranks by host, each ascending; ``hosts`` has the host of every rank."""
    ranks_by_host: dict[Hashable, list[int]] = {}
    for rank in sorted(members):
        ranks_by_host.setdefault(hosts[rank], []).append(rank)
    return [tuple(ranks) for ranks in ranks_by_host.values()]


def cross_host_groups(parts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the groups between hosts: workers with the same part, or the first worker of each host."""
    if len({len(part) for part in parts}) == 1:
        return list(zip(*parts, strict=True))
    return [tuple(part[0] for part in parts)]


class HierarchicalTransport:
    """The workers of several hosts; the interface is :class:`~.protocol.Transport`.

    Collectives of a group inside one host go over shared memory, those over several hosts take the steps of the module,
    and everything else goes over torch.distributed.

    Args:
        hub: connections of this worker to the others of its host.
        hosts: host of every rank; equal for ranks that the hub connects.
        world: this worker among all workers.
        channels: every (sender, receiver) pair that will be used, in the same order at every rank.
        groups: the ranks of every collective, in the same order at every rank.
        tag: number that differs between transports of one world, see :class:`.c10d.C10dTransport`.
        own_groups: never use the world's own group for sums, because others may use it in another order.
    """

    def __init__(
        self,
        hub: MessageHub,
        hosts: Sequence[Hashable],
        world: World,
        channels: Iterable[protocol.Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
    ) -> None:
        self.rank, self.size, self.is_ordered = world.rank, world.size, False
        self.counters = protocol.TransportCounters()
        channels = list(dict.fromkeys(channels))
        named = list(dict.fromkeys(protocol.normalize_group(group, world.size) for group in groups))
        parts = {members: group_by_host(members, hosts) for members in named}
        host_groups = [members for members in named if len(parts[members]) == 1]
        beyond = [members for members in named if len(parts[members]) > 1]
        all_ranks = set(range(world.size))
        near = [(a, b) for a, b in channels if {a, b} <= all_ranks and hosts[a] == hosts[b]]
        far = [pair for pair in channels if pair not in set(near)]
        self._host_trees = {
            members: _build_host_tree(world.rank, parts[members]) for members in beyond if world.rank in members
        }
        steps = [part for members in beyond for part in parts[members] if len(part) > 1]
        across = [ring for members in beyond for ring in cross_host_groups(parts[members])]
        # The caller's thread uses the first two transports, the thread of the sums the last two: a transport is not
        # thread-safe, and the order of collectives inside each stays that of one thread.
        self._inside_host = shared_memory.SharedMemoryTransport(hub, world, near, host_groups)
        self._between_hosts: c10d.C10dTransport = c10d.C10dTransport(world, far, beyond, tag, own_groups)
        # A collective over hosts is counted once, as it is started: the transports of its steps count for nobody.
        self._inside_host.counters = self._between_hosts.counters = self.counters
        self._steps = shared_memory.SharedMemoryTransport(hub, world, (), steps)
        self._across = c10d.C10dTransport(world, (), across, tag, own_groups=True)
        self._thread = SerialThread("polylane-hosts")
        self._peers = {peer for pair in near if world.rank in pair for peer in pair} - {world.rank}

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        return (self._inside_host if peer in self._peers else self._between_hosts).send(tensor, peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        return (self._inside_host if peer in self._peers else self._between_hosts).receive(shape, dtype, peer)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        members = protocol.normalize_group(ranks, self.size)
        tree = self._host_trees.get(members)
        if tree is None:
            return self._transport_of(members).all_reduce(tensor, members)
        protocol.require_summable(tensor)
        if tensor.numel() == 0:
            return FinishedTransfer(tensor)
        wire = protocol.make_contiguous(tensor)
        self.counters.count_sent("all_reduce", wire, tree.bytes_sent(wire.numel(), wire.element_size()))
        future, target = self._thread.submit(self._sum_over_hosts, wire.view(-1), tree), tensor.detach()

        def finish() -> Tensor:
            future.result()
            return protocol.copy_back(wire, target)

        return Deferred(finish)

    def _sum_over_hosts(self, wire: Tensor, tree: HostTree) -> None:
        """Run the three steps of a sum, in place, in the sums' own thread."""
        sizes, alone = tree.part_sizes(wire.numel()), len(tree.host_ranks) == 1
        part = wire if alone else self._steps.reduce_scatter(wire, tree.host_ranks, sizes).wait()
        # Workers without a part still take part in steps 1 and 3.
        if part.numel():
            self._across.all_reduce(part, tree.cross_ranks).wait()
        if not alone:
            wire.copy_(self._steps.all_gather(part, tree.host_ranks, sizes).wait())

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        tree, ranks = self._even_tree(ranks), tuple(ranks)
        if tree is None:
            return self._transport_of(ranks).all_gather(tensor, ranks, sizes)
        sizes = protocol.gathered_sizes(tensor, ranks.index(self.rank), ranks, sizes)
        wire = protocol.make_contiguous(tensor)
        self.counters.count_sent("all_gather", wire, wire.nbytes * (len(ranks) - 1))
        by_rank = dict(zip(ranks, sizes, strict=True))
        return Deferred(self._thread.submit(self._gather_over_hosts, wire, tree, by_rank).result)

    def _gather_over_hosts(self, wire: Tensor, tree: HostTree, sizes: dict[int, int]) -> Tensor:
        """Run the steps of an all-gather; ``sizes`` has the elements of ranks' parts, in the order of the result."""
        column = self._across.all_gather(wire, tree.cross_ranks, [sizes[rank] for rank in tree.cross_ranks]).wait()
        widths = [sum(sizes[rank] for rank in ranks) for ranks in tree.columns]
        if len(tree.host_ranks) > 1:
            column = self._steps.all_gather(column, tree.host_ranks, widths).wait()
        order = tree.by_columns()
        parts = dict(zip(order, column.split([sizes[rank] for rank in order]), strict=True))
        return torch.cat([parts[rank] for rank in sizes])

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        tree, ranks = self._even_tree(ranks), tuple(ranks)
        if tree is None:
            return self._transport_of(ranks).reduce_scatter(tensor, ranks, sizes)
        protocol.require_summable(tensor)
        protocol.require_flat(tensor)
        by_rank = dict(zip(ranks, protocol.part_sizes(tensor.numel(), ranks, sizes), strict=True))
        wire = protocol.make_contiguous(tensor)
        leaving = (wire.numel() - by_rank[self.rank]) * wire.element_size()
        self.counters.count_sent("reduce_scatter", wire, leaving)
        return Deferred(self._thread.submit(self._scatter_over_hosts, wire, tree, by_rank).result)

    def _scatter_over_hosts(self, wire: Tensor, tree: HostTree, sizes: dict[int, int]) -> Tensor:
        """Run the steps of a reduce-scatter; ``sizes`` has the elements of ranks' parts, in their order in ``wire``."""
        parts = dict(zip(sizes, wire.split(list(sizes.values())), strict=True))
        column = torch.cat([parts[rank] for rank in tree.by_columns()])
        widths = [sum(sizes[rank] for rank in ranks) for ranks in tree.columns]
        if len(tree.host_ranks) > 1:
            column = self._steps.reduce_scatter(column, tree.host_ranks, widths).wait()
        return self._across.reduce_scatter(column, tree.cross_ranks, [sizes[rank] for rank in tree.cross_ranks]).wait()

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        ranks = tuple(ranks)
        tree = self._even_tree(ranks)
        if tree is None or tensor.numel() == 0:
            return self._transport_of(ranks).broadcast(tensor, source, ranks)
        protocol.require_source(source, ranks)
        wire, target = protocol.make_contiguous(tensor), tensor.detach()
        if source == self.rank:
            self.counters.count_sent("broadcast", wire, wire.nbytes * (len(ranks) - 1))
        else:
            self.counters.messages["broadcast"] += 1
        future = self._thread.submit(self._broadcast_over_hosts, wire, tree, source)

        def finish() -> Tensor:
            future.result()
            return protocol.copy_back(wire, target)

        return Deferred(finish)

    def _broadcast_over_hosts(self, wire: Tensor, tree: HostTree, source: int) -> None:
        """Run the steps of a broadcast, in place."""
        index, column = next((index, ranks) for index, ranks in enumerate(tree.columns) if source in ranks)
        if self.rank in column:
            self._across.broadcast(wire, source, column).wait()
        if len(tree.host_ranks) > 1:
            self._steps.broadcast(wire, tree.host_ranks[index], tree.host_ranks).wait()

    def _even_tree(self, ranks: Iterable[int]) -> HostTree | None:
        """Return how a group over several hosts communicates, all of which have as many of its workers; else None."""
        tree = self._host_trees.get(protocol.normalize_group(ranks, self.size))
        return tree if tree is not None and tree.is_even else None

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        return self._transport_of(ranks).all_to_all(pieces, shapes, ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._between_hosts.all_gather_object(value)

    def barrier(self) -> None:
        self._between_hosts.barrier()

    def close(self) -> None:
        self._thread.close()
        for transport in (self._steps, self._inside_host, self._across, self._between_hosts):
            transport.close()

    def _transport_of(self, ranks: Iterable[int]) -> shared_memory.SharedMemoryTransport | c10d.C10dTransport:
        """Return the transport of a group's collectives: between hosts if it has members on several."""
        spans_hosts = protocol.normalize_group(ranks, self.size) in self._host_trees
        return self._between_hosts if spans_hosts else self._inside_host


class HierarchicalConnections:
    """Constructor of transports over shared memory inside each host, which share their connections.

    Args:
        world: this worker among all workers, as it was when the hub was made.
        hub: connections of this worker to the others of its host.
        hosts: host of every rank; if all are equal, nothing goes over the network.
    """

    def __init__(self, world: World, hub: MessageHub, hosts: Sequence[Hashable]) -> None:
        self._world, self._hub, self._hosts = world, hub, hosts

    def __call__(
        self,
        world: World,
        channels: Iterable[protocol.Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
        exchanges: bool = True,
    ) -> HierarchicalTransport | shared_memory.SharedMemoryTransport:
        """Build a transport; the arguments are those of :class:`.c10d.C10dTransport`.

        Over shared memory every transport has keys and groups of its own, whatever ``tag`` and ``own_groups`` say, and
        all pairs are connected, whatever ``exchanges`` says.

        Raises:
            PolylaneError: earlier transports have been closed, and the workers of a host cannot connect again.
        """
        if self._hub.is_closed:  # closed with its last transport, at all workers alike: they close the same ones
            self._hub = reconnect_hub(self._world, self._hosts)
        if len(set(self._hosts)) == 1:
            return shared_memory.SharedMemoryTransport(self._hub, world, channels, groups)
        return HierarchicalTransport(self._hub, self._hosts, world, channels, groups, tag, own_groups)


def _build_host_tree(rank: int, parts: Sequence[tuple[int, ...]]) -> HostTree:
    host_ranks = next(part for part in parts if rank in part)
    columns = tuple(cross_host_groups(parts))
    across = next((column for column in columns if rank in column), ())
    return HostTree(host_ranks, host_ranks.index(rank), across, len({len(part) for part in parts}) == 1, columns)
