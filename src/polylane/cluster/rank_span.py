"""Span: through which links a group of ranks is connected, and how its ranks are spread over hosts, racks and sites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from polylane.cluster.link import Link

# Ranks, as a range or one by one.
Ranks = Sequence[int]


class Level(IntEnum):
    """How far apart ranks are: what the narrowest part of the tree is that has them all."""

    DEVICE = 0
    HOST = 1
    RACK = 2
    SITE = 3
    CLUSTER = 4


@dataclass(frozen=True)
class HostBlock:
    """Hosts that are alike and have consecutive ranks.

    Attributes:
        first: the lowest rank.
        first_host: the number of the first host.
        hosts: how many.
        devices: of each host.
        rack, site: their numbers.
        link: inside a host; None for hosts of one device.
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
        """The first rank behind it."""
        return self.first + self.hosts * self.devices


@dataclass(frozen=True)
class LinkUse:
    """A link that a group of ranks uses.

    Its units are what the link connects: devices inside a host, hosts inside a rack, racks, sites. What goes from rack
    to rack leaves a host, too: the link between hosts is then used, even where no rack has two of the hosts.

    Attributes:
        link: the link.
        level: the part of the tree that it holds together: HOST for the link between devices.
        ring_edges: how many edges of a ring through all ranks, one unit after the other, end at it: they go no further
            than this level. The closing edge is left out.
        unit_count: how many units use it; inside hosts, the most in one of them.
        max_units: the most units in one part of the tree that it holds together.
        units: the (ranks of the group, devices) of a unit, each pair that occurs once. Inside a host, of the whole
            host.
    """

    link: Link
    level: Level
    ring_edges: int
    unit_count: int
    max_units: int
    units: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RankSpan:
    """A group of ranks in the tree; two are equal only where they are the same object, so that looking one up is quick.

    Attributes:
        ranks: how many.
        level: the narrowest part of the tree that has them all.
        crossings: the links they use, the narrowest first; none for one rank.
    """

    ranks: int
    level: Level
    crossings: tuple[LinkUse, ...]

    def at_level(self, level: Level) -> list[LinkUse]:
        """The crossings of one level."""
        return [crossing for crossing in self.crossings if crossing.level == level]


def span_of(blocks: Sequence[HostBlock], between: Mapping[Level, Link | None], ranks: Ranks) -> RankSpan:
    """Where ranks are.

    Args:
        blocks: all hosts, by ascending ranks.
        between: the link of each level above a host.
        ranks: each one once, in any order; a range takes time that does not grow with it.
    """
    spread = list(_spread(blocks, ranks))
    total = sum(count * hosts for _, per_host in spread for count, hosts in per_host.items())
    crossings = [*_links_inside_hosts(spread), *_links_between_hosts(blocks, between, spread)]
    level = max((crossing.level for crossing in crossings if crossing.ring_edges), default=Level.DEVICE)
    return RankSpan(total, level, tuple(crossings))


_Spread = tuple[HostBlock, Counter[int]]


def _spread(blocks: Sequence[HostBlock], ranks: Ranks) -> Iterator[_Spread]:
    """The blocks with ranks of the group, and how many of their hosts have how many of them."""
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


def count_ranks_between(ranks: Ranks, first: int, end: int) -> int:
    """How many of the ranks are ``first`` or more and lower than ``end``."""
    if isinstance(ranks, range):
        ascending = ranks if ranks.step > 0 else ranks[::-1]
        return _count_lower_ranks(ascending, end) - _count_lower_ranks(ascending, first)
    return sum(first <= rank < end for rank in ranks)


def _count_lower_ranks(ranks: range, rank: int) -> int:
    """How many of ascending ranks are lower."""
    return min(max(-((ranks.start - rank) // ranks.step), 0), len(ranks))


def _hosts_by_ranks(ranks: range, block: HostBlock) -> Counter[int]:
    """How many hosts of a block have how many ranks of a range that lies in it."""
    step, devices = ranks.step, block.devices
    if len(ranks) == 1 or step >= devices:
        return Counter({1: len(ranks)})
    first, last = ((rank - block.first) // devices for rank in (ranks[0], ranks[-1]))
    counts: Counter[int] = Counter()
    whole = range(first + 1, last) if devices % step == 0 else range(0)
    if whole:
        counts[devices // step] = len(whole)
    for host in {first, last} if devices % step == 0 else range(first, last + 1):
        start = block.first + host * devices
        counts[count_ranks_between(ranks, start, start + devices)] += 1
    return counts


def _links_inside_hosts(spread: Sequence[_Spread]) -> Iterator[LinkUse]:
    """The links inside hosts with several ranks of the group, each link once."""
    found: dict[int, tuple[Link, list[_Spread]]] = {}
    for block, hosts in spread:
        if block.link is not None and max(hosts) > 1:
            found.setdefault(id(block.link), (block.link, []))[1].append((block, hosts))
    for link, parts in found.values():
        edges = sum((count - 1) * number for _, hosts in parts for count, number in hosts.items())
        units = {(count, block.devices) for block, hosts in parts for count in hosts if count > 1}
        widest = max(count for count, _ in units)
        yield LinkUse(link, Level.HOST, edges, widest, widest, tuple(sorted(units)))


def _links_between_hosts(
    blocks: Sequence[HostBlock], between: Mapping[Level, Link | None], spread: Sequence[_Spread]
) -> Iterator[LinkUse]:
    """The links between hosts, racks and sites."""
    hosts: Counter[int] = Counter()
    pairs: set[tuple[int, int]] = set()
    for block, per_host in spread:
        hosts[block.rack] += per_host.total()
        pairs |= {(count, block.devices) for count in per_host}
    sites = {block.rack: block.site for block, _ in spread}
    racks = Counter(sites.values())
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
    """How many ranks of the group, and devices, there are in each rack or site that has any; each pair once."""
    ranks: Counter[int] = Counter()
    devices: Counter[int] = Counter()
    for block, hosts in spread:
        ranks[unit(block)] += sum(count * number for count, number in hosts.items())
    for block in blocks:
        devices[unit(block)] += block.hosts * block.devices
    return tuple(sorted({(count, devices[at]) for at, count in ranks.items()}))
