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
                _, _, version, payload = heapq.heappop(self.events)
                if isinstance(payload, Transmission):
                    self._deliver(payload)
                elif version == payload.version:
                    self._handle_progress(payload)

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
        activity = _Activity(op.task.seconds, self.now, lane=lane, op=op)
        if lane not in self.host_of:
            self._set_speed(activity, 1)
            return
        host = self.host_of[lane]
        self.computing[host][activity] = None
        self.changed_hosts[host] = None

    # Transfers

    def _mark_ready(self, travel: Transmission) -> None:
        travel.requested_at = self.now
        travel.missing_count -= 1
        if not travel.missing_count:
            self._begin_transfer(travel)

    def _begin_transfer(self, travel: Transmission) -> None:
        transfer, travel.start = travel.transfer, self.now
        activity = _Activity(transfer.seconds, self.now, message=travel)
        if not transfer.seconds:
            self._finish_transfer(activity, travel)
            return
        if transfer.cpu:
            for lane in travel.end_lanes:
                if lane in self.host_of:
                    activity.hosts[self.host_of[lane]] = activity.hosts.get(self.host_of[lane], 0) + 1
        for host in activity.hosts:
            self.moving[host][activity] = None
        self.changed_hosts |= dict.fromkeys(activity.hosts)
        if not activity.hosts:
            self._set_speed(activity, 1)

    def _finish_transfer(self, activity: _Activity, travel: Transmission) -> None:
        """End a transfer: release its cores, start those queued behind it, deliver it after its latency."""
        for host in activity.hosts:
            del self.moving[host][activity]
        self.changed_hosts |= dict.fromkeys(activity.hosts)
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

    def _push_event(self, time: float, version: int, payload: _Activity | Transmission) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, version, payload))

    def _handle_progress(self, activity: _Activity) -> None:
        """Handle an event of an activity: it releases its next transfer, or ends."""
        if activity.op is not None and activity.freed_count < len(activity.op.released):
            self._mark_ready(activity.op.released[activity.freed_count][1])
            activity.freed_count += 1
            self._schedule(activity)
        elif activity.op is not None:
            if activity.lane in self.host_of:
                del self.computing[self.host_of[activity.lane]][activity]
                self.changed_hosts[self.host_of[activity.lane]] = None
            self._finish_op(activity.lane, activity.op)
            self.again.append(activity.lane)
        else:
            assert activity.message is not None
            self._finish_transfer(activity, activity.message)

    def _schedule(self, activity: _Activity) -> None:
        """Push the event at which an activity releases its next transfer, or ends, at its present speed."""
        target = activity.full
        if activity.op is not None and activity.freed_count < len(activity.op.released):
            fraction = activity.op.released[activity.freed_count][0]
            target = target if fraction == 1 else fraction * target
        seconds_left = target - activity.seconds_done
        self._push_event(
            max(self.now, activity.since + (seconds_left if activity.speed == 1 else seconds_left / activity.speed)),
            activity.version,
            activity,
        )

    def _set_speed(self, activity: _Activity, speed: float) -> None:
        """Change the speed of an activity; one that keeps its speed keeps its event, exact to the last digit."""
        if speed != activity.speed:
            if activity.speed:
                activity.seconds_done += (self.now - activity.since) * activity.speed
                activity.version += 1
            activity.since, activity.speed = self.now, speed
            self._schedule(activity)

    # Shares

    def _share_cores(self, host: int) -> None:
        """Recompute the speeds on a host whose users have changed."""
        computing, moving = self.computing[host], self.moving[host]
        # Water filling: every computing lane asks for a core, a transfer for its share at each of its ends.
        demands = [
            (activity.message.transfer.cpu, activity.hosts[host]) for activity in moving if activity.message is not None
        ]
        self.levels[host] = water_fill_level(self.hosts[host].cores, [(1.0, len(computing)), *demands])
        rate = min(1.0, self.levels[host]) * self.factors[host][len(computing)]
        for activity in computing:
            assert activity.op is not None
            # Time that a task waits in collectives is not slowed by shared cores: the average speed over
            # the task.
            waited = activity.op.task.waited
            slowed = rate if rate == 1 or not waited else activity.full / ((activity.full - waited) / rate + waited)
            self._set_speed(activity, slowed)
        for activity in moving:
            assert activity.message is not None
            cpu = activity.message.transfer.cpu
            self._set_speed(activity, min(1.0, *(self.levels[end_host] / cpu for end_host in activity.hosts)))
