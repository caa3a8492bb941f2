"""Parameter servers: seconds and bytes of pushed gradients, updates and pulled weights, for all replicas of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from polylane.cluster.catalogue import link_presets
from polylane.cluster.link import Link
from polylane.cost.network.collectives import message_seconds
from polylane.cost.plan_cost import PlanCost
from polylane.cost.simulator.server_queue import ServedSteps, ServerLoad, simulate_servers
from polylane.observe.timeline import Span, Timeline
from polylane.placement.placement import Shard
from polylane.program.lower import differentiable_parameters
from polylane.program.server_assignment import assign_parameters, server_rank
from polylane.schedule.action import ActionKind

# Passes over a tensor's bytes: packed into a message or taken out of it (read and written), and added to a sum.
COPY, ADD = 2, 3


@dataclass(frozen=True)
class ServedTimeline:
    """A predicted step of replicas that synchronize through servers.

    Attributes:
        timeline: of one step, whose optimizer steps last until the new weights are there.
        steps: how the replicas advance in the long run.
    """

    timeline: Timeline
    steps: ServedSteps


class ServerCosts:
    """Prices of what the workers of a plan exchange with its parameter servers.

    Args:
        scene: costs of the plan's stages.
    """

    def __init__(self, scene: PlanCost) -> None:
        self._scene, self._plan, self._cluster = scene, scene.plan, scene.basis.cluster
        self._trained = differentiable_parameters(scene.partition.graph)

    @cached_property
    def shares(self) -> tuple[frozenset[str], ...]:
        """Names of the parameters of each server."""
        return tuple(frozenset(names) for names in assign_parameters({"loss": self._scene.partition}, self._plan))

    def pulled_bytes(self, rank: int, server: int) -> int:
        """Return the bytes of a server's weights that a worker gets in a step, from its own process too."""
        stage = self._plan.stage_and_replica(rank)[0]
        return sum(self._bytes(stage, name) for name in self._held(stage) & self.shares[server])

    def pushed_bytes(self, rank: int, server: int) -> int:
        """Return the bytes of gradients that a worker gives a server in a step: of its replica's equal ones, one."""
        stage = self._plan.stage_and_replica(rank)[0]
        names = (name for name in self._held(stage) & self.shares[server] if self._speaks_for(rank, stage, name))
        return sum(self._bytes(stage, name) for name in names)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that leave a worker's process in a step: gradients, and the weights its servers answer."""
        total = 0
        for server in range(len(self.shares)):
            at = server_rank(self._plan, server)
            if at != rank:
                total += self.pushed_bytes(rank, server)
            else:
                total += sum(
                    self.pulled_bytes(worker, server) for worker in range(self._plan.workers) if worker != rank
                )
        return total

    def loads(self) -> list[ServerLoad]:
        """Return what each server exchanges with every replica, and what it does with it."""
        basis, loads = self._scene.basis, list[ServerLoad]()
        replicas = self._replicas
        for server, names in enumerate(self.shares):
            at = server_rank(self._plan, server)
            device = self._cluster.device(at % self._cluster.count)
            size = sum(self._scene.partition.graph.parameters[name].bytes for name in names)
            elements = sum(math.prod(self._scene.partition.graph.parameters[name].shape) for name in names)
            push = (sum(self._message(self.pushed_bytes(r, server), r, at) for r in ranks) for ranks in replicas)
            pull = (sum(self._message(self.pulled_bytes(r, server), at, r) for r in ranks) for ranks in replicas)
            copied = COPY * size / device.stream
            added = copied + ADD * size / device.stream
            update = basis.update_seconds(device, elements)
            loads.append(ServerLoad(tuple(push), tuple(pull), added, update, copied))
        return loads

    def client_seconds(self) -> float:
        """Return the seconds in which a worker packs its gradients and takes over the new weights."""
        first_ranks = [ranks[0] for ranks in self._replicas]
        most_bytes = max(sum(self.pulled_bytes(r, s) for s in range(len(self.shares))) for r in first_ranks)
        return 2 * COPY * most_bytes / self._cluster.device(0).stream

    def advance(self, timeline: Timeline, lanes: Sequence[int]) -> ServedTimeline:
        """Return a step with the servers' part in it, and how replicas advance in the long run.

        Args:
            timeline: of a step in which nothing is synchronized.
            lanes: rank of the worker that each lane shows; all replicas are like the first one where not all are shown.
        """
        # A stage is priced by its slowest device, for in most synchronizations all wait for it. Here they do not.
        of = [self._plan.stage_and_replica(rank)[1] for rank in lanes]
        factors = [self._relative_seconds(replica) for replica in range(self._plan.data)]
        timeline = replace(timeline, spans=tuple(_stretch(span, factors[of[span.rank]]) for span in timeline.spans))
        ends = [max((s.end for s in timeline.spans if of[s.rank] == r), default=0.0) for r in range(self._plan.data)]
        ends = [end or ends[0] for end in ends]
        client = self.client_seconds()
        steps = simulate_servers([end + client for end in ends], self.loads(), self._plan.sync.staleness)
        spans = list[Span]()
        for span in timeline.spans:
            if span.action.kind is ActionKind.STEP:
                end = ends[of[span.rank]] + client + steps.waits[of[span.rank]]
                span = replace(span, end=end, waited=end - span.start, bytes=self.sent_bytes(lanes[span.rank]))
            spans.append(span)
        return ServedTimeline(replace(timeline, spans=tuple(spans)), steps)

    def _relative_seconds(self, replica: int) -> float:
        """Return the seconds of a replica's passes, relative to those of the slowest devices of its stages."""

        def speed(ranks: Sequence[int]) -> float:
            device = self._scene.basis.slowest_device(ranks)
            return device.speed * max(device.achieved.values())

        replica_ranks = self._replicas[replica]
        return max(
            speed(stage.devices) / speed([rank for rank in stage.devices if rank in replica_ranks])
            for stage in self._plan.stages
        )

    @cached_property
    def _replicas(self) -> list[list[int]]:
        """The ranks of each replica."""
        replicas: list[list[int]] = [[] for _ in range(self._plan.data)]
        for rank in range(self._plan.workers):
            replicas[self._plan.stage_and_replica(rank)[1]].append(rank)
        return replicas

    def _held(self, stage: int) -> frozenset[str]:
        chunks, partition = self._plan.chunks(stage), self._scene.partition
        return frozenset(name for chunk in chunks for name in partition.parameters(chunk)) & self._trained

    def _bytes(self, stage: int, name: str) -> int:
        """Return the local bytes of a parameter on a rank of a stage, in its own dtype."""
        info = self._scene.partition.graph.parameters[name]
        elements = math.prod(self._scene.sharded_graph(stage).busiest_shape(f"parameter:{name}"))
        return elements * info.bytes // max(1, math.prod(info.shape))

    def _speaks_for(self, rank: int, stage: int, name: str) -> bool:
        """Return whether a worker sends a gradient: the first of its replica that has the same one."""
        if any(name in self._held(chunk) for chunk in self._plan.first_chunks if chunk < stage):
            return False
        sheet, at = self._scene.sharded_graph(stage), self._plan.coordinates(rank)
        cuts = dict(zip(sheet.splits, sheet.placements((f"parameter:{name}", 0)), strict=True))
        return all(index == 0 for axis, index in at.items() if axis not in cuts or not isinstance(cuts[axis], Shard))

    def _message(self, size: float, source: int, target: int) -> float:
        """Return the seconds of a message between two processes; 0 within one, and for a message of nothing."""
        if source == target or not size:
            return 0.0
        count = self._cluster.count
        ends = source % count, target % count
        # Servers talk over gloo, which copies through sockets where workers of a host share memory.
        if self._cluster.host(ends[0]) == self._cluster.host(ends[1]):
            link = Link.model_validate(link_presets()["loopback"])
            if self._cluster.device(ends[0]).type == "cpu" or ends[0] == ends[1]:
                return _socket_seconds(link, size)
        return message_seconds(self._cluster, size, *ends)


def _stretch(span: Span, factor: float) -> Span:
    return replace(span, start=span.start * factor, end=span.end * factor, waited=span.waited * factor)


def _socket_seconds(link: Link, size: float) -> float:
    return link.delay("send") + link.hop + size / link.solo_bandwidth("send")
