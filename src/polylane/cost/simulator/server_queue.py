"""Parameter servers in time: replicas push gradients, servers queue and apply them, replicas pull weights.

A program's order of tasks is fixed, and a server's is not: it takes what arrives first. So servers have an event
simulation of their own, of whole steps of whole replicas.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from polylane.plan.sync import Staleness

# Steps of each replica that are simulated, and the first of them that do not count: all replicas begin at once.
STEPS, LEAD = 40, 8
PASSES_END = -1


@dataclass(frozen=True)
class ServerLoad:
    """What one server exchanges with every replica, and what it does with it.

    Attributes:
        push: by replica, seconds in which its gradients pass the server's link; 0 within one process.
        pull: by replica, seconds in which the new weights come back over it.
        adding: seconds of the server to take in the gradients of one replica.
        update: seconds of one update of the weights.
        answer: seconds of the server to pack the weights for one replica.
    """

    push: tuple[float, ...]
    pull: tuple[float, ...]
    adding: float
    update: float
    answer: float


@dataclass(frozen=True)
class ServedSteps:
    """How replicas advance that synchronize through servers.

    Attributes:
        seconds: of a step of all replicas together, in the long run: samples of a batch by samples a second.
        waits: by replica, seconds from the end of its passes to the new weights, on average.
        apart: the most steps that a replica was ahead of the slowest one.
    """

    seconds: float
    waits: tuple[float, ...]
    apart: int


def simulate_servers(
    compute: Sequence[float], servers: Sequence[ServerLoad], staleness: Staleness, steps: int = STEPS
) -> ServedSteps:
    """Simulate replicas that push to all servers after each step, and wait for all of them.

    Messages of a replica leave one after another, and so do those that a server's link takes in or gives out. A server
    handles one message at a time, in the order of arrival.

    Args:
        compute: by replica, seconds of its passes.
        servers: what each server exchanges and does.
        staleness: most steps that a replica may be ahead of the slowest; 0: one update of all gradients together;
            "any": no bound.
        steps: number of steps that every replica takes.
    """
    return _ServerSimulation(compute, servers, staleness, steps).run()


class _ServerSimulation:
    def __init__(
        self, compute: Sequence[float], servers: Sequence[ServerLoad], staleness: Staleness, steps: int
    ) -> None:
        self._compute, self._servers, self._staleness, self._steps = compute, servers, staleness, steps
        # Time, order, server and replica: gradients have arrived there; server -1: the replica's passes have ended.
        self._events: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        count = len(compute)
        self._done = [0] * count  # steps of each replica
        self._pushed, self._ended = [0.0] * count, [list[float]() for _ in range(count)]
        self._waited = [0.0] * count
        self._missing = [0] * count  # answers that each replica still waits for
        self._answered = [0.0] * count  # when the latest answer to each replica arrives
        self._applied = [[0] * count for _ in servers]  # by server, steps of each replica that it has applied
        self._unanswered = [set[int]() for _ in servers]
        self._busy, self._in, self._out = ([0.0] * len(servers) for _ in "123")
        self._apart = 0

    def run(self) -> ServedSteps:
        for replica, seconds in enumerate(self._compute):
            self._schedule(seconds, PASSES_END, replica)
        while self._events:
            time, _, server, replica = heapq.heappop(self._events)
            if server == PASSES_END:
                self._push(replica, time)
            else:
                self._handle(server, replica, time)
        # Until the first replica is done all of them are at work: what they do in that time is their rate.
        until, lead = min(times[-1] for times in self._ended), min(LEAD, self._steps // 2)
        since = max(times[lead - 1] for times in self._ended) if lead else 0.0
        if until <= since:
            since = 0.0
        step_count = sum(_count_between(times, since, until) for times in self._ended)
        waits = tuple(waited / self._steps for waited in self._waited)
        return ServedSteps(len(self._compute) * (until - since) / step_count, waits, self._apart)

    def _schedule(self, time: float, server: int, replica: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), server, replica))

    def _push(self, replica: int, time: float) -> None:
        """Send the gradients of a replica's step, which ends at this time, to all servers."""
        self._pushed[replica], self._missing[replica] = time, len(self._servers)
        leaves = time
        for number, server in enumerate(self._servers):
            start = max(leaves, self._in[number]) if server.push[replica] else leaves
            arrives = start + server.push[replica]
            if server.push[replica]:
                leaves = self._in[number] = arrives
            self._schedule(arrives, number, replica)

    def _handle(self, number: int, replica: int, time: float) -> None:
        """Take in a replica's gradients at a server, apply them where that is due, and answer who may go on."""
        server, applied = self._servers[number], self._applied[number]
        clock = max(time, self._busy[number]) + server.adding
        self._busy[number] = clock
        if self._staleness == 0:
            self._unanswered[number].add(replica)
            if len(self._unanswered[number]) < len(self._compute):
                return
            clock += server.update
            for waiting_replica in self._unanswered[number]:
                applied[waiting_replica] += 1
        else:
            clock += server.update
            applied[replica] += 1
            self._unanswered[number].add(replica)
        # A replica that has taken all its steps holds nobody back.
        slowest = min((count for count in applied if count < self._steps), default=self._steps)
        for waiting_replica in sorted(self._unanswered[number]):
            ahead = applied[waiting_replica] - slowest
            if self._staleness == "any" or ahead <= self._staleness:
                self._unanswered[number].discard(waiting_replica)
                self._apart = max(self._apart, ahead)
                clock += server.answer
                self._answer(number, waiting_replica, clock)
        self._busy[number] = clock

    def _answer(self, number: int, replica: int, time: float) -> None:
        """Send a replica its new weights; with those of the last server it begins its next step."""
        pull = self._servers[number].pull[replica]
        arrives = max(time, self._out[number]) + pull if pull else time
        if pull:
            self._out[number] = arrives
        self._missing[replica] -= 1
        self._answered[replica] = max(self._answered[replica], arrives)
        if self._missing[replica]:
            return
        begins = self._answered[replica]
        self._waited[replica] += begins - self._pushed[replica]
        self._ended[replica].append(begins)
        self._done[replica] += 1
        if self._done[replica] < self._steps:
            self._schedule(begins + self._compute[replica], PASSES_END, replica)


def _count_between(times: Sequence[float], since: float, until: float) -> float:
    """Return how many steps ended after one time and until another, with the part of the one that is under way."""

    def count(at: float) -> float:
        step_count = sum(time <= at for time in times)
        if step_count == len(times):
            return float(step_count)
        begin = times[step_count - 1] if step_count else 0.0
        return step_count + (at - begin) / (times[step_count] - begin)

    return count(until) - count(since)
