"""Play lanes that share cores and links: from event to event, everything under way at the speed that it then has."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from polylane.cost.fair import level, speeds
from polylane.cost.host import Host
from polylane.cost.matching import Does, Op, Travel


@dataclass(slots=True, eq=False)
class _Work:
    """A task or a transfer under way.

    Attributes:
        full: its seconds undisturbed.
        lane, op: of a task.
        travel, hosts, links: of a transfer, with how many of its lanes each host has, and what it takes of each link.
        done: of its seconds, at the moment ``since``; from then on it gains ``speed`` each second.
        mark: how many of the travels that its op frees have been freed.
        version: which of its events is the valid one.
        cap: of a transfer, the speed that its hosts' cores allow.
    """

    full: float
    since: float
    lane: int = -1
    op: Op | None = None
    travel: Travel | None = None
    hosts: dict[int, int] = field(default_factory=dict)
    links: dict[Hashable, float] = field(default_factory=dict)
    done: float = 0
    speed: float = 0
    mark: int = 0
    version: int = 0
    cap: float = 1


class Fluid:
    """All lanes, with what is under way.

    Args:
        lanes: as matched; when every task and travel runs is written to them.
        hosts: those whose cores may not do for all.
        links: the capacity of those that may not do for all.
    """

    def __init__(self, lanes: list[list[Op]], hosts: Sequence[Host], links: Mapping[Hashable, float]) -> None:
        self.lanes = lanes
        self.hosts = hosts
        self.capacity = links
        self.now: float = 0
        self.at = [0] * len(lanes)
        self.again = list(range(len(lanes)))
        self.events: list[tuple[float, int, int, _Work | Travel]] = []
        self.count = 0
        self.host_of = {lane: number for number, host in enumerate(hosts) for lane in host.lanes}
        self.factors = [[1.0, *map(host.factor, range(1, len(host.lanes) + 1))] for host in hosts]
        # Insertion order decides how sums are rounded: dictionaries, not sets.
        self.computing: list[dict[_Work, None]] = [{} for _ in hosts]
        self.moving: list[dict[_Work, None]] = [{} for _ in hosts]
        self.levels = [float("inf")] * len(hosts)
        self.users: dict[Hashable, dict[_Work, None]] = {link: {} for link in links}
        self.changed_hosts: dict[int, None] = {}
        self.changed_links: dict[Hashable, None] = {}

    def run(self) -> None:
        """Play to the end, or until nothing can proceed."""
        while True:
            while self.again:
                self._advance(self.again.pop())
            self._share()
            if not self.events:
                return
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, version, what = heapq.heappop(self.events)
                if isinstance(what, Travel):
                    self._arrived(what)
                elif version == what.version:
                    self._reached(what)

    # Lanes

    def _advance(self, lane: int) -> None:
        """Go on in a lane that does nothing at the moment."""
        ops = self.lanes[lane]
        while self.at[lane] < len(ops):
            op = ops[self.at[lane]]
            if self._waits(lane, op):
                return
            if op.task.seconds and op.does is not Does.ASK:
                self._compute(lane, op)
                return
            for _, travel in op.frees:
                self._ready(travel)
            self._leave(lane, op)

    def _waits(self, lane: int, op: Op) -> bool:
        """Whether the lane, having come to a task, has to wait."""
        if op.does in (Does.COMPUTE, Does.SEND):
            missing = next((travel for travel in op.waits if travel.arrival is None), None)
            if missing is None:
                op.start = self.now
        else:
            assert op.travel is not None
            if op.start is None:
                op.start = self.now
                if op.asks:
                    self._ready(op.travel)
            missing = None if op.does is Does.ASK or op.travel.arrival is not None else op.travel
            if missing is None and op.does is not Does.ASK:
                op.start = max(op.start, op.travel.asked)
        if missing is not None:
            missing.waiting += (lane,)
        return missing is not None

    def _leave(self, lane: int, op: Op) -> None:
        op.end = self.now
        self.at[lane] += 1
        if op.does is Does.SEND and op.asks:
            assert op.travel is not None
            self._ready(op.travel)

    def _compute(self, lane: int, op: Op) -> None:
        work = _Work(op.task.seconds, self.now, lane=lane, op=op)
        if lane not in self.host_of:
            self._speed(work, 1)
            return
        host = self.host_of[lane]
        self.computing[host][work] = None
        self.changed_hosts[host] = None

    # Transfers

    def _ready(self, travel: Travel) -> None:
        travel.asked = self.now
        travel.missing -= 1
        if not travel.missing:
            self._begin(travel)

    def _begin(self, travel: Travel) -> None:
        transfer, travel.start = travel.transfer, self.now
        work = _Work(transfer.seconds, self.now, travel=travel)
        if not transfer.seconds:
            self._left(work, travel)
            return
        if transfer.cpu:
            for lane in travel.concerns:
                if lane in self.host_of:
                    work.hosts[self.host_of[lane]] = work.hosts.get(self.host_of[lane], 0) + 1
        work.links = {link: amount for link, amount in transfer.links.items() if link in self.capacity}
        for host in work.hosts:
            self.moving[host][work] = None
        self.changed_hosts |= dict.fromkeys(work.hosts)
        for link in work.links:
            self.users[link][work] = None
        self.changed_links |= dict.fromkeys(work.links)
        if not work.hosts and not work.links:
            self._speed(work, 1)

    def _left(self, work: _Work, travel: Travel) -> None:
        """A transfer has ended: those behind it may move, and it arrives."""
        for host in work.hosts:
            del self.moving[host][work]
        self.changed_hosts |= dict.fromkeys(work.hosts)
        for link in work.links:
            del self.users[link][work]
        self.changed_links |= dict.fromkeys(work.links)
        travel.end = self.now
        if travel.transfer.latency:
            self._event(self.now + travel.transfer.latency, 0, travel)
        else:
            self._arrived(travel)
        for behind in travel.next:
            behind.missing -= 1
            if not behind.missing:
                self._begin(behind)

    def _arrived(self, travel: Travel) -> None:
        travel.arrival = self.now
        self.again += travel.waiting

    # Events

    def _event(self, time: float, version: int, what: _Work | Travel) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, version, what))

    def _reached(self, work: _Work) -> None:
        """Work has come to the next travel that it frees, or to its end."""
        if work.op is not None and work.mark < len(work.op.frees):
            self._ready(work.op.frees[work.mark][1])
            work.mark += 1
            self._schedule(work)
        elif work.op is not None:
            if work.lane in self.host_of:
                del self.computing[self.host_of[work.lane]][work]
                self.changed_hosts[self.host_of[work.lane]] = None
            self._leave(work.lane, work.op)
            self.again.append(work.lane)
        else:
            assert work.travel is not None
            self._left(work, work.travel)

    def _schedule(self, work: _Work) -> None:
        """The event of when work comes to what is next."""
        target = work.full
        if work.op is not None and work.mark < len(work.op.frees):
            fraction = work.op.frees[work.mark][0]
            target = target if fraction == 1 else fraction * target
        left = target - work.done
        self._event(max(self.now, work.since + (left if work.speed == 1 else left / work.speed)), work.version, work)

    def _speed(self, work: _Work, speed: float) -> None:
        """Let work go on at another speed; one that keeps its speed keeps its end, to the last digit."""
        if speed != work.speed:
            if work.speed:
                work.done += (self.now - work.since) * work.speed
                work.version += 1
            work.since, work.speed = self.now, speed
            self._schedule(work)

    # Shares

    def _share(self) -> None:
        """New speeds for all who share what somebody has taken up or let go of."""
        for host in self.changed_hosts:
            self._share_cores(host)
        self.changed_hosts.clear()
        while self.changed_links:
            self._share_links(next(iter(self.changed_links)))

    def _share_cores(self, host: int) -> None:
        computing, moving = self.computing[host], self.moving[host]
        demands = [(work.travel.transfer.cpu, work.hosts[host]) for work in moving if work.travel is not None]
        self.levels[host] = level(self.hosts[host].cores, [(1.0, len(computing)), *demands])
        rate = min(1.0, self.levels[host]) * self.factors[host][len(computing)]
        for work in computing:
            assert work.op is not None
            waited = work.op.task.waited
            slowed = rate if rate == 1 or not waited else work.full / ((work.full - waited) / rate + waited)
            self._speed(work, slowed)
        for work in moving:
            assert work.travel is not None
            cpu = work.travel.transfer.cpu
            cap = min(1.0, *(self.levels[each] / cpu for each in work.hosts))
            if cap != work.cap:
                work.cap = cap
                self.changed_links |= dict.fromkeys(work.links)
            if not work.links:
                self._speed(work, cap)

    def _share_links(self, link: Hashable) -> None:
        """New speeds for all transfers that share a link with this one, or with each other."""
        links: dict[Hashable, None] = {link: None}
        works: dict[_Work, None] = {}
        for each in (look := [link]):
            self.changed_links.pop(each, None)
            for work in self.users[each]:
                if work not in works:
                    works[work] = None
                    look += [other for other in work.links if other not in links]
                    links |= dict.fromkeys(work.links)
        found = speeds(
            [work.cap for work in works],
            [work.links for work in works],
            {each: self.capacity[each] for each in links},
        )
        for work, speed in zip(works, found, strict=True):
            self._speed(work, speed)
