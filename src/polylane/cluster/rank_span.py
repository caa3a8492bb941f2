"""Rank span: the links that connect a group of ranks, and how its ranks are spread over hosts, racks and sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from polylane.cluster.link import Link

# Ranks, as a range or one by one.
Ranks = Sequence[int]


class Level(IntEnum):
    """Levels of the tree; the level of a group of ranks is that of the narrowest part of the tree that has them all."""

    DEVICE = 0
    HOST = 1
    RACK = 2
    SITE = 3
    CLUSTER = 4


@dataclass(frozen=True)
class HostBlock:
    """Identical hosts with consecutive ranks.

    Attributes:
        first: lowest rank of the block.
        first_host: number of the first host, from 0.
        hosts: number of hosts in the block.
        devices: number of devices of each host.
        rack, site: numbers of the rack and of its site.
        link: link inside a host; None for hosts of one device.
    """

    first: int
    first_host: int
    hosts: int
    devices: int
    rack: int
    site: int
    link: Link | None

    @property
    def end(self) -> int:
        """The first rank behind the block."""
        return self.first + self.hosts * self.devices


@dataclass(frozen=True)
class LinkUse:
    """A link that a group of ranks uses.

    Its units are what the link connects: devices inside a host, hosts inside a rack, racks, sites. What is sent from
    rack to rack leaves a host, too: the link between hosts is then used, even where no rack has two of the hosts.

    Attributes:
        link: bandwidth and latency of the link.
        level: the part of the tree that the link connects: HOST for the link between devices.
        ring_edges: edges of a ring through all ranks, one unit after the other, for which this is the widest level that
            they cross. The closing edge is left out.
        unit_count: number of units that use the link; inside hosts, the most in one of them.
        max_units: the most units in one part of the tree that the link connects.
        units: pairs (ranks of the group, devices) of the units, each pair once. Inside a host, of the whole host.
    """

    link: Link
    level: Level
    ring_edges: int
    unit_count: int
    max_units: int
    units: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RankSpan:
    """A group of ranks in the tree; compared by identity, so that caches find it quickly.

    Attributes:
        ranks: number of ranks in the group.
        level: the narrowest part of the tree that has them all.
        crossings: links that they use, the narrowest first; none for one rank.
    """

    ranks: int
    level: Level
    crossings: tuple[LinkUse, ...]

    def at_level(self, level: Level) -> list[LinkUse]:
        """Return the crossings of one level."""
        return [crossing for crossing in self.crossings if crossing.level == level]


def span_of(blocks: Sequence[HostBlock], between: Mapping[Level, Link | None], ranks: Ranks) -> RankSpan:
    """Find the span of a group of ranks.

    Args:
        blocks: all hosts of the cluster, by ascending ranks.
        between: the link of each level above a host.
        ranks: ranks of the group, each once, in any order; the time for a range does not grow with its length.
    """
    # Hosts are counted by how many ranks of the group they have, not one by one: a group may have a million ranks.
    spread = list(_spread(blocks, ranks))
    total = sum(count * hosts for _, per_host in spread for count, hosts in per_host.items())
    crossings = [*_links_inside_hosts(spread), *_links_between_hosts(blocks, between, spread)]
    level = max((crossing.level for crossing in crossings if crossing.ring_edges), default=Level.DEVICE)
    return RankSpan(total, level, tuple(crossings))


_Spread = tuple[HostBlock, Counter[int]]


def _spread(blocks: Sequence[HostBlock], ranks: Ranks) -> Iterator[_Spread]:
    """Yield the blocks with ranks of the group, with: number of ranks -> number of hosts that have so many of them."""
    if isinstance(ranks, range):
        ascending = ranks if ranks.step > 0 else ranks[::-1]
        for block in blocks:
            low, high = _count_lower_ranks(ascending, block.first), _count_lower_ranks(ascending, block.end)
            if high > low:
                yield block, _hosts_by_ranks(ascending[low:high], block)
        return
    ordered, at = sorted(ranks), 0
    for block in blocks:
        hosts: Counter[int] = Counter()
        while at < len(ordered) and ordered[at] < block.end:
            hosts[(ordered[at] - block.first) // block.devices] += 1
            at += 1
        if hosts:
            yield block, Counter(hosts.values())


def count_ranks_between(ranks: Ranks, start: int, end: int) -> int:
    """Count the ranks from ``start`` up to, but not including, ``end``."""
    if isinstance(ranks, range):
        ascending = ranks if ranks.step > 0 else ranks[::-1]
        return _count_lower_ranks(ascending, end) - _count_lower_ranks(ascending, start)
    return sum(start <= rank < end for rank in ranks)


def _count_lower_ranks(ranks: range, rank: int) -> int:
    """Count the ranks of an ascending range that are lower than ``rank``."""
    return min(max(-((ranks.start - rank) // ranks.step), 0), len(ranks))


def _hosts_by_ranks(ranks: range, block: HostBlock) -> Counter[int]:
    """Count the hosts of a block by how many ranks they have of a range that is inside the block."""
    step, devices = ranks.step, block.devices
    if len(ranks) == 1 or step >= devices:
        return Counter({1: len(ranks)})
    first_host, last_host = ((rank - block.first) // devices for rank in (ranks[0], ranks[-1]))
    counts: Counter[int] = Counter()
    # Where the step divides the devices of a host, all hosts between the first and the last have equally many ranks.
    inner_hosts = range(first_host + 1, last_host) if devices % step == 0 else range(0)
    if inner_hosts:
        counts[devices // step] = len(inner_hosts)
    for host in {first_host, last_host} if devices % step == 0 else range(first_host, last_host + 1):
        start = block.first + host * devices
        counts[count_ranks_between(ranks, start, start + devices)] += 1
    return counts


def _links_inside_hosts(spread: Sequence[_Spread]) -> Iterator[LinkUse]:
    """Yield the links inside hosts with several ranks of the group, each link once."""
    spreads_by_link: dict[int, tuple[Link, list[_Spread]]] = {}
    for block, hosts in spread:
        if block.link is not None and max(hosts) > 1:
            spreads_by_link.setdefault(id(block.link), (block.link, []))[1].append((block, hosts))
    for link, parts in spreads_by_link.values():
        edges = sum((count - 1) * number for _, hosts in parts for count, number in hosts.items())
        units = {(count, block.devices) for block, hosts in parts for count in hosts if count > 1}
        widest = max(count for count, _ in units)
        yield LinkUse(link, Level.HOST, edges, widest, widest, tuple(sorted(units)))


def _links_between_hosts(
    blocks: Sequence[HostBlock], between: Mapping[Level, Link | None], spread: Sequence[_Spread]
) -> Iterator[LinkUse]:
    """Yield the links between hosts, racks and sites that the group uses."""
    hosts: Counter[int] = Counter()
    pairs: set[tuple[int, int]] = set()
    for block, per_host in spread:
        hosts[block.rack] += per_host.total()
        pairs |= {(count, block.devices) for count in per_host}
    sites = {block.rack: block.site for block, _ in spread}
    racks = Counter(sites.values())  # number of racks with ranks of the group, by site
    # A ring in order of ranks crosses each level once less than it has units: n hosts in r racks are n - r edges
    # between hosts of one rack, r - s between racks of one site, s - 1 between sites.
    if (link := between.get(Level.RACK)) is not None and hosts.total() > 1:
        edges = hosts.total() - len(hosts)
        yield LinkUse(link, Level.RACK, edges, hosts.total(), max(hosts.values()), tuple(sorted(pairs)))
    if (link := between.get(Level.SITE)) is not None and len(sites) > 1:
        units = _used_units(blocks, spread, lambda block: block.rack)
        yield LinkUse(link, Level.SITE, len(sites) - len(racks), len(sites), max(racks.values()), units)
    if (link := between.get(Level.CLUSTER)) is not None and len(racks) > 1:
        units = _used_units(blocks, spread, lambda block: block.site)
        yield LinkUse(link, Level.CLUSTER, len(racks) - 1, len(racks), len(racks), units)


def _used_units(
    blocks: Sequence[HostBlock], spread: Sequence[_Spread], unit: Callable[[HostBlock], int]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs (ranks of the group, devices) of the racks or sites that have any ranks; each pair once."""
    ranks: Counter[int] = Counter()
    devices: Counter[int] = Counter()
    for block, hosts in spread:
        ranks[unit(block)] += sum(count * number for count, number in hosts.items())
    for block in blocks:
        devices[unit(block)] += block.hosts * block.devices
    return tuple(sorted({(count, devices[at]) for at, count in ranks.items()}))
