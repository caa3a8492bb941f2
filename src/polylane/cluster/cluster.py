"""Cluster: devices and links as a tree, device < host < rack < site; ranks count its devices, host by host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pydantic

from polylane.cluster.device import Device
from polylane.cluster.link import Link, Natural, Positive, Share, Units
from polylane.cluster.rank_span import HostBlock, Level, Ranks, RankSpan, count_ranks_between, span_of
from polylane.errors import PolylaneError
from polylane.yaml_file import StrictMapping

# Most spans that are cached; then the cache is emptied.
_REMEMBERED = 2**16


class Hosts(StrictMapping):
    """Identical hosts in one rack.

    Attributes:
        count: number of hosts in this group.
        devices: number of devices of each host; on a CPU host the workers that may run there.
        device: figures of each of these devices.
        link: link between the devices of a host; a host of one device needs none.
        crowded: the link where more workers run on a CPU host than ``cores``, who sleep while they wait, and must get a
            core again. None: the same link.
        rack, site: names of the rack and of its site; groups with equal names are in the same one.
        cores: how many workers of a host may compute at once without slowing each other; None: all.
        contention: number of workers that compute at once -> speed of each, as a fraction of one alone, since they
            share the host's memory. Other numbers are interpolated.
        speed: factor for all devices of the host (0.8: each takes 1 / 0.8 of the time).
        price: price per device and hour, instead of the device's own.
    """

    count: Units = 1
    devices: Units = 1
    device: Device
    link: Link | None = None
    crowded: Link | None = None
    rack: str = ""
    site: str = ""
    cores: Units | None = None
    contention: dict[Units, Share] = pydantic.Field(default={})
    speed: Positive = 1.0
    price: Natural | None = None


class Links(StrictMapping):
    """The links between hosts of a rack, racks of a site, and sites.

    A site has one connection to the others, which its devices share: where the link between sites does not give their
    total bandwidth (``total``), that is its bandwidth.

    Attributes:
        hosts: link between the hosts of a rack; None where each has one.
        racks: link between the racks of a site; None where each has one.
        sites: link between sites; None where there is one.
    """

    hosts: Link | None = None
    racks: Link | None = None
    sites: Link | None = None

    @pydantic.field_validator("sites")
    @classmethod
    def _shared(cls, sites: Link | None) -> Link | None:
        return sites if sites is None or sites.total else sites.model_copy(update={"total": sites.bandwidth})


@dataclass(frozen=True)
class Cluster:
    """Devices, and how they are linked.

    Attributes:
        hosts: groups of identical hosts; their devices have ranks in this order.
        links: links between hosts, racks and sites.
        speeds: by rank, a speed factor for single devices: stragglers.

    Raises:
        PolylaneError: there are no hosts, a link that devices need to reach each other is missing, or a rank does not
            exist; naming the key of the cluster file.
    """

    hosts: tuple[Hosts, ...]
    links: Links = field(default_factory=Links)
    speeds: Mapping[int, float] = field(default_factory=dict)
    _blocks: tuple[HostBlock, ...] = field(init=False, repr=False, compare=False)
    _devices: dict[tuple[int, float], Device] = field(init=False, repr=False, compare=False, default_factory=dict)
    _spans: dict[Ranks, RankSpan] = field(init=False, repr=False, compare=False, default_factory=dict)
    # Keyed by what costs depend on: groups that are spread alike share one RankSpan, so their costs are computed once.
    _shapes: dict[object, RankSpan] = field(init=False, repr=False, compare=False, default_factory=dict)
    _crowded: dict[tuple[bool, ...], Cluster] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.hosts:
            raise PolylaneError("hosts: there must be at least one")
        object.__setattr__(self, "_blocks", tuple(_host_blocks(self.hosts)))
        _check_links(self.hosts, self.links)
        for rank, speed in self.speeds.items():
            if not 0 <= rank < self.count:
                raise PolylaneError(f"speeds.{rank}: there is no such device, they are 0 to {self.count - 1}")
            if not 0 < speed < float("inf"):
                raise PolylaneError(f"speeds.{rank} must be above 0, not {speed}")

    def __reduce__(self) -> tuple[type[Cluster], tuple[tuple[Hosts, ...], Links, dict[int, float]]]:
        # Without the caches: spans are compared by identity, and a copy has its own.
        return Cluster, (self.hosts, self.links, dict(self.speeds))

    @property
    def count(self) -> int:
        """Number of devices; ranks are 0 to this, exclusive."""
        return self._blocks[-1].end

    @property
    def price(self) -> float:
        """Price of all devices per hour; 0 where it is not known."""
        prices = (group.device.price if group.price is None else group.price for group in self.hosts)
        return sum(price * group.count * group.devices for price, group in zip(prices, self.hosts, strict=True))

    def device(self, rank: int) -> Device:
        """Return the device of a rank, with its speed and price in this cluster."""
        return self._device(self._group(rank), self.speeds.get(rank, 1.0))

    def devices(self, ranks: Ranks) -> list[Device]:
        """Return the different devices of ranks, each once; quick for a range."""
        self._check(ranks)
        # By blocks, since ranks may be a million: first the stragglers one by one, then a block's own device where it
        # has ranks that are no stragglers.
        single = [rank for rank in self.speeds if rank in ranks]
        keys = dict.fromkeys((self._group(rank), self.speeds[rank]) for rank in single)
        for number, block in enumerate(self._blocks):
            if count_ranks_between(ranks, block.first, block.end) > count_ranks_between(single, block.first, block.end):
                keys[number, 1.0] = None
        return [self._device(*key) for key in keys]

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        block = self._blocks[self._group(rank)]
        return block.first_host + (rank - block.first) // block.devices

    def cores(self, rank: int) -> int | None:
        """Return how many workers of a rank's host may compute at once without slowing each other; None: all."""
        return self.hosts[self._group(rank)].cores

    def contention(self, rank: int) -> Mapping[int, float] | None:
        """Return the contention of a rank's host (:attr:`Hosts.contention`); None where there is none."""
        return self.hosts[self._group(rank)].contention or None

    def for_workers(self, workers: int) -> Cluster:
        """Return the cluster with the links that hold where its first ``workers`` ranks run: those of crowded hosts.

        The same cluster where no host has more of them than cores, or its link is the same then.
        """
        full = tuple(
            group.crowded is not None
            and group.cores is not None
            and min(group.devices, workers - block.first) > group.cores
            for group, block in zip(self.hosts, self._blocks, strict=True)
        )
        if not any(full):
            return self
        if full not in self._crowded:
            hosts = tuple(
                group.model_copy(update={"link": group.crowded}) if crowds else group
                for group, crowds in zip(self.hosts, full, strict=True)
            )
            self._crowded[full] = Cluster(hosts, self.links, self.speeds)
        return self._crowded[full]

    def span(self, ranks: Ranks) -> RankSpan:
        """Return the links that connect ranks, and how they are spread; groups that are spread alike share one span."""
        key = ranks if isinstance(ranks, (range, tuple)) else tuple(ranks)
        span = self._spans.get(key)
        if span is None:
            self._check(key)
            links = self.links
            between = {Level.RACK: links.hosts, Level.SITE: links.racks, Level.CLUSTER: links.sites}
            new = span_of(self._blocks, between, key)
            shape = (
                new.ranks,
                *((id(c.link), c.level, c.ring_edges, c.unit_count, c.max_units, c.units) for c in new.crossings),
            )
            if len(self._spans) >= _REMEMBERED:
                self._spans.clear()
            if len(self._shapes) >= _REMEMBERED:
                self._shapes.clear()
            span = self._spans[key] = self._shapes.setdefault(shape, new)
        return span

    def level(self, ranks: Ranks) -> Level:
        """Return the level of the narrowest part of the tree that has all ranks."""
        return self.span(ranks).level

    def link(self, ranks: Ranks) -> Link:
        """Return the link of the narrowest level that has all ranks; the slowest, where hosts have different links.

        Raises:
            ValueError: there is one rank only, which needs no link.
        """
        widest = self.span(ranks).at_level(self.level(ranks))
        if not widest:
            raise ValueError("one device needs no link")
        return min((crossing.link for crossing in widest), key=lambda link: link.bandwidth)

    def _group(self, rank: int) -> int:
        if not 0 <= rank < self.count:
            raise ValueError(f"there is no rank {rank}, they are 0 to {self.count - 1}")
        return bisect_right(self._blocks, rank, key=lambda block: block.first) - 1

    def _device(self, group: int, speed: float) -> Device:
        key = group, speed
        if key not in self._devices:
            hosts = self.hosts[group]
            price = hosts.device.price if hosts.price is None else hosts.price
            change = {"speed": hosts.device.speed * hosts.speed * speed, "price": price}
            self._devices[key] = hosts.device.model_copy(update=change)
        return self._devices[key]

    def _check(self, ranks: Ranks) -> None:
        # The ends of a range are enough; a list is checked in full.
        ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) and ranks else ranks
        if not ends or min(ends) < 0 or max(ends) >= self.count:
            raise ValueError(f"ranks {ranks} are not all of 0 to {self.count - 1}")


def ranks_along(degrees: Mapping[str, int], axis: str, rank: int = 0) -> range:
    """Return the ranks that differ from one only on one axis of a mesh in row-major order.

    >>> ranks_along({"data": 4, "pipeline": 2, "tensor": 8}, "pipeline", 3)
    range(3, 19, 8)
    """
    inner = 1  # stride of the axis: the product of the degrees behind it
    for name in reversed(list(degrees)):
        if name == axis:
            first_rank = rank - rank // inner % degrees[axis] * inner
            return range(first_rank, first_rank + degrees[axis] * inner, inner)
        inner *= degrees[name]
    raise ValueError(f"{axis} is no axis of {', '.join(degrees)}")


def _host_blocks(hosts: tuple[Hosts, ...]) -> Iterator[HostBlock]:
    # A rack is known by its name and its site: racks of equal name in different sites are different.
    racks: dict[tuple[str, str], int] = {}
    sites: dict[str, int] = {}
    first_rank, first_host = 0, 0
    for group in hosts:
        rack = racks.setdefault((group.site, group.rack), len(racks))
        site = sites.setdefault(group.site, len(sites))
        block = HostBlock(first_rank, first_host, group.count, group.devices, rack, site, group.link)
        yield block
        first_rank, first_host = block.end, first_host + group.count


def _check_links(hosts: tuple[Hosts, ...], links: Links) -> None:
    """Refuse a tree in which some device cannot reach another, for a link that is missing."""
    for index, group in enumerate(hosts):
        if group.devices > 1 and group.link is None:
            raise PolylaneError(f"hosts.{index}.link is missing: nothing links the {group.devices} devices of a host")
    blocks = list(_host_blocks(hosts))
    racks = [sum(block.hosts for block in blocks if block.rack == rack) for rack in {block.rack for block in blocks}]
    sites = [len({b.rack for b in blocks if b.site == site}) for site in {block.site for block in blocks}]
    for name, link, units, description in (
        ("hosts", links.hosts, max(racks), "hosts of a rack"),
        ("racks", links.racks, max(sites), "racks of a site"),
        ("sites", links.sites, len(sites), "sites"),
    ):
        if link is None and units > 1:
            raise PolylaneError(f"links.{name} is missing: nothing links the {units} {description}")
