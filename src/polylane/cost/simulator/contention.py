"""Contention simulator: discrete events; speeds change as tasks and transfers start and end."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from polylane.cost.simulator.matching import Role, ScheduledTask, Transmission
from polylane.cost.simulator.shared_cores import SharedCores, water_fill_level


@dataclass(slots=True, eq=False)
class _Activity:
    """A running task or transfer.

    Attributes:
        full: its undisturbed duration in seconds.
        since, seconds_done, speed: at time ``since`` it has done ``seconds_done`` of its duration; from then on it
            gains ``speed`` per second.
        lane, op: lane and task, if it is a task.
        message, hosts: if it is a transfer: itself, number of its end lanes by host.
        freed_count: how many of the transfers that its task releases have been released.
        version: number of its valid event; queued events with another one are stale.
    """

    full: float
    since: float
    lane: int = -1
    op: ScheduledTask | None = None
    message: Transmission | None = None
    hosts: dict[int, int] = field(default_factory=dict)
    seconds_done: float = 0
    speed: float = 0
    freed_count: int = 0
    version: int = 0


class ContentionSimulator:
    """Simulates all lanes from event to event.

    Args:
        lanes: matched tasks by lane; start and end of every task and transfer are written to them.
        hosts: hosts whose cores may not suffice for all their lanes.
    """

    def __init__(self, lanes: list[list[ScheduledTask]], hosts: Sequence[SharedCores]) -> None:
        self.lanes = lanes
        self.hosts = hosts
        self.now: float = 0
        # Position of every lane, and lanes that may be able to proceed.
        self.at = [0] * len(lanes)
        self.again = list(range(len(lanes)))
        self.events: list[tuple[float, int, int, _Activity | Transmission]] = []
        self.count = 0
        self.host_of = {lane: number for number, host in enumerate(hosts) for lane in host.lanes}
        # factors[host][k]: speed of each of k lanes that compute at once on the host's memory, cores aside.
        self.factors = [[1.0, *map(host.slowdown, range(1, len(host.lanes) + 1))] for host in hosts]
        # Sums over these are rounded by insertion order: dictionaries, not sets, keep results reproducible.
        self.computing: list[dict[_Activity, None]] = [{} for _ in hosts]
        self.moving: list[dict[_Activity, None]] = [{} for _ in hosts]
        self.levels = [float("inf")] * len(hosts)
        self.changed_hosts: dict[int, None] = {}

    def run(self) -> None:
        """Run to the end, or until nothing can proceed (a deadlock, reported by the caller)."""
        while True:
            while self.again:
                self._advance(self.again.pop())
            # Speeds are recomputed once for all changes at this time, before the clock moves.
            for host in self.changed_hosts:
                self._share_cores(host)
            self.changed_hosts.clear()
            if not self.events:
                return
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, version, what = heapq.heappop(self.events)
                if isinstance(what, Transmission):
                    self._deliver(what)
                elif version == what.version:
                    self._handle_progress(what)

    # Lanes

    def _advance(self, lane: int) -> None:
        """Proceed in an idle lane until a task takes time or must wait."""
        ops = self.lanes[lane]
        while self.at[lane] < len(ops):
            op = ops[self.at[lane]]
            if self._must_wait(lane, op):
                return
            if op.task.seconds and op.role is not Role.ASK:
                self._compute(lane, op)
                return
            for _, travel in op.released:
                self._mark_ready(travel)
            self._finish_op(lane, op)

    def _must_wait(self, lane: int, op: ScheduledTask) -> bool:
        """Note that a lane has reached a task; return whether it has to wait."""
        if op.role in (Role.COMPUTE, Role.SEND):
            missing = next((travel for travel in op.awaited if travel.arrival is None), None)
            if missing is None:
                op.start = self.now
        else:
            assert op.message is not None
            if op.start is None:
                op.start = self.now
                if op.requests_on_arrival:
                    self._mark_ready(op.message)
            missing = None if op.role is Role.ASK or op.message.arrival is not None else op.message
            if missing is None and op.role is not Role.ASK:
                op.start = max(op.start, op.message.requested_at)
        if missing is not None:
            missing.waiting_lanes += (lane,)
        return missing is not None

    def _finish_op(self, lane: int, op: ScheduledTask) -> None:
        op.end = self.now
        self.at[lane] += 1
        if op.role is Role.SEND and op.requests_on_arrival:
            assert op.message is not None
            self._mark_ready(op.message)

    def _compute(self, lane: int, op: ScheduledTask) -> None:
        work = _Activity(op.task.seconds, self.now, lane=lane, op=op)
        if lane not in self.host_of:
            self._set_speed(work, 1)
            return
        host = self.host_of[lane]
        self.computing[host][work] = None
        self.changed_hosts[host] = None

    # Transfers

    def _mark_ready(self, travel: Transmission) -> None:
        travel.requested_at = self.now
        travel.missing_count -= 1
        if not travel.missing_count:
            self._begin_transfer(travel)

    def _begin_transfer(self, travel: Transmission) -> None:
        transfer, travel.start = travel.transfer, self.now
        work = _Activity(transfer.seconds, self.now, message=travel)
        if not transfer.seconds:
            self._finish_transfer(work, travel)
            return
        if transfer.cpu:
            for lane in travel.end_lanes:
                if lane in self.host_of:
                    work.hosts[self.host_of[lane]] = work.hosts.get(self.host_of[lane], 0) + 1
        for host in work.hosts:
            self.moving[host][work] = None
        self.changed_hosts |= dict.fromkeys(work.hosts)
        if not work.hosts:
            self._set_speed(work, 1)

    def _finish_transfer(self, work: _Activity, travel: Transmission) -> None:
        """End a transfer: release its cores, start those queued behind it, deliver it after its latency."""
        for host in work.hosts:
            del self.moving[host][work]
        self.changed_hosts |= dict.fromkeys(work.hosts)
        travel.end = self.now
        if travel.transfer.latency:
            self._push_event(self.now + travel.transfer.latency, 0, travel)
        else:
            self._deliver(travel)
        for behind in travel.next_on_channel:
            behind.missing_count -= 1
            if not behind.missing_count:
                self._begin_transfer(behind)

    def _deliver(self, travel: Transmission) -> None:
        travel.arrival = self.now
        self.again += travel.waiting_lanes

    # Events

    def _push_event(self, time: float, version: int, what: _Activity | Transmission) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, version, what))

    def _handle_progress(self, work: _Activity) -> None:
        """Handle an event of an activity: it releases its next transfer, or ends."""
        if work.op is not None and work.freed_count < len(work.op.released):
            self._mark_ready(work.op.released[work.freed_count][1])
            work.freed_count += 1
            self._schedule(work)
        elif work.op is not None:
            if work.lane in self.host_of:
                del self.computing[self.host_of[work.lane]][work]
                self.changed_hosts[self.host_of[work.lane]] = None
            self._finish_op(work.lane, work.op)
            self.again.append(work.lane)
        else:
            assert work.message is not None
            self._finish_transfer(work, work.message)

    def _schedule(self, work: _Activity) -> None:
        """Push the event at which an activity releases its next transfer, or ends, at its present speed."""
        target = work.full
        if work.op is not None and work.freed_count < len(work.op.released):
            fraction = work.op.released[work.freed_count][0]
            target = target if fraction == 1 else fraction * target
        left = target - work.seconds_done
        self._push_event(
            max(self.now, work.since + (left if work.speed == 1 else left / work.speed)), work.version, work
        )

    def _set_speed(self, work: _Activity, speed: float) -> None:
        """Change the speed of an activity; one that keeps its speed keeps its event, exact to the last digit."""
        if speed != work.speed:
            if work.speed:
                work.seconds_done += (self.now - work.since) * work.speed
                work.version += 1
            work.since, work.speed = self.now, speed
            self._schedule(work)

    # Shares

    def _share_cores(self, host: int) -> None:
        """Recompute the speeds on a host whose users have changed."""
        computing, moving = self.computing[host], self.moving[host]
        # Water filling: every computing lane asks for a core, a transfer for its share at each of its ends.
        demands = [(work.message.transfer.cpu, work.hosts[host]) for work in moving if work.message is not None]
        self.levels[host] = water_fill_level(self.hosts[host].cores, [(1.0, len(computing)), *demands])
        rate = min(1.0, self.levels[host]) * self.factors[host][len(computing)]
        for work in computing:
            assert work.op is not None
            # Time that a task waits in collectives is not slowed by shared cores: the average speed over
            # the task.
            waited = work.op.task.waited
            slowed = rate if rate == 1 or not waited else work.full / ((work.full - waited) / rate + waited)
            self._set_speed(work, slowed)
        for work in moving:
            assert work.message is not None
            cpu = work.message.transfer.cpu
            self._set_speed(work, min(1.0, *(self.levels[each] / cpu for each in work.hosts)))
