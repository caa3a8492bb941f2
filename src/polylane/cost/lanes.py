"""Lanes: what the workers of a plan do in a step, action by action, with durations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.cost import network
from polylane.cost.communicate import sent
from polylane.cost.host import Host
from polylane.cost.scene import Scene
from polylane.cost.task import Task, Transfer
from polylane.program.program import Bucket, Program
from polylane.schedule.action import Action, Kind


class Lanes:
    """The tasks of a plan's workers.

    Args:
        scene: the plan and its prices.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene, self._plan = scene, scene.plan
        self._transfers: dict[Hashable, Transfer] = {}
        self._sums: dict[Hashable, tuple[int, Transfer, float] | None] = {}
        self._steps: dict[Hashable, tuple[float, int]] = {}

    def tasks(self, program: Program, lanes: Sequence[int]) -> list[Task]:
        """What a worker does, with durations; ``lanes`` are the ranks that are played."""
        last = {action.stage: action for action in program.actions if action.kind is Kind.BACKWARD}
        buckets = {bucket.name: bucket for bucket in program.buckets}
        travels = self._routes(program, lanes)
        found = list[Task]()
        for action in program.actions:
            if action.kind in (Kind.SEND, Kind.RECEIVE):
                route = travels[action.kind, action.value, action.peer, action.gradient]
                if route is not None:
                    found.append(route.task(action))
            elif action.kind is Kind.REDUCE:
                assert action.value is not None
                bucket = buckets[action.value]
                found += self._reduces(program, action, bucket, last[self._completing(program, bucket)], lanes)
            else:
                found.append(self._computes(program, action))
        return found

    def _computes(self, program: Program, action: Action) -> Task:
        own, overhead = self._scene.stage(program.stage), self._scene.basis.overhead
        took, sharing = own.passes, own.sharing
        if action.kind is Kind.FORWARD:
            waits = took.waits + sharing.waits
            return Task(action, took.forward + waits + overhead, waits, int(took.sent / 2 + sharing.sent))
        if action.kind is Kind.BACKWARD:
            waits = took.backward_waits + sharing.backward_waits
            return Task(action, took.backward + waits + overhead, waits, int(took.sent / 2 + sharing.backward_sent))
        waits, bytes_ = self._handed(program)
        return Task(action, own.update + waits, waits, bytes_)

    def _handed(self, program: Program) -> tuple[float, int]:
        """Seconds and bytes in which replicas hand each other the parameters that each has updated, all at once."""
        key = (program.stage, program.replicas)
        if key not in self._steps:
            kind, ranks = self._scene.basis.method.handing, program.replicas
            size = sum(self.bucket_bytes(program.stage, bucket) for bucket in program.buckets)
            seconds = network.collective(self._scene.basis.cluster, kind if size else "", size, ranks, None)
            self._steps[key] = seconds, int(sent(kind, size, len(ranks)))
        return self._steps[key]

    def _routes(self, program: Program, lanes: Sequence[int]) -> dict[Hashable, _Route | None]:
        """How the messages of a worker go, the same for every microbatch, by kind, value, peer and direction.

        Where one rank stands for a whole stage, all that it sends to another stage is one message: that to the first
        of its peers there; the others are None.
        """
        folded = len(lanes) < self._plan.workers
        lane_of = {self._plan.place(rank)[0]: lane for lane, rank in reversed(list(enumerate(lanes)))}
        found = dict[Hashable, _Route | None]()
        seen = set[Hashable]()
        for action in program.actions:
            own = (action.kind, action.value, action.peer, action.gradient)
            if action.kind not in (Kind.SEND, Kind.RECEIVE) or own in found:
                continue
            assert action.peer is not None and action.value is not None
            other = self._plan.place(action.peer)[0]
            there, here = (program.stage, other) if action.kind is Kind.SEND else (other, program.stage)
            peers = 1
            if not folded:
                receiver = action.peer if action.kind is Kind.SEND else program.rank
                peers = len(self._plan.peers(receiver, there))
            elif (action.kind, action.value, other, action.gradient) in seen:
                found[own] = None
                continue
            seen.add((action.kind, action.value, other, action.gradient))
            size = self._scene.sheet(here).value(action.value, self._scene.samples(here)) / peers
            lane = lane_of[other] if folded else action.peer
            found[own] = _Route(lane, int(size), self._transfer(size, there, here), (there, here) if folded else None)
        return found

    def _transfer(self, size: float, source: int, target: int) -> Transfer:
        """A message between ranks of two stages."""
        key = (size, source, target)
        if key not in self._transfers:
            ends = self._plan.stages[source].devices[0], self._plan.stages[target].devices[0]
            streams = len(self._plan.stages[target].devices)
            empty = network.transfer(self._scene.basis.cluster, 0.0, *ends)
            whole = network.transfer(self._scene.basis.cluster, size, *ends, streams)
            self._transfers[key] = Transfer(whole - empty, empty, cpu=self._cpu(ends))
        return self._transfers[key]

    def _cpu(self, ranks: Sequence[int]) -> float:
        """Cores that what these ranks send each other keeps busy at each end."""
        return self._scene.basis.cluster.link(ranks).cpu if len(ranks) > 1 else 0.0

    def _reduces(
        self, program: Program, action: Action, bucket: Bucket, last: Action, lanes: Sequence[int]
    ) -> list[Task]:
        """Gradients that are summed from when the last backward pass has them all; none if the passes sum them."""
        key = (program.stage, bucket.name, bucket.ranks)
        if key not in self._sums:
            seconds, bytes_ = self._summing(bucket)
            fraction = self._ready(program.stage, bucket) if self._scene.basis.method.overlap else 1.0
            transfer = Transfer(seconds, cpu=self._cpu(bucket.ranks))
            self._sums[key] = (int(bytes_), transfer, fraction) if seconds or bytes_ else None
        found = self._sums[key]
        if found is None:
            return []
        bytes_, transfer, fraction = found
        task = Task(
            action,
            bytes=bytes_,
            transfer=transfer,
            lanes=tuple(i for i, rank in enumerate(lanes) if rank in bucket.ranks),
            after=last,
            fraction=fraction,
            overlapped=self._scene.basis.method.overlap,
        )
        return [task]

    def _summing(self, bucket: Bucket) -> tuple[float, float]:
        """Seconds and bytes that a rank sends until gradients are summed, as far as the method has it.

        Replicas that update a part each sum but that part; what else sums these gradients (ranks that split operators,
        stages that hold tied weights) then sums the parts.
        """
        cluster, method = self._scene.basis.cluster, self._scene.basis.method
        ranks: Sequence[int] = bucket.ranks
        stages = {self._places[rank][0] for rank in ranks}
        # Where stages have unlike parts of tied weights, the largest.
        size, seconds, bytes_ = max(self.bucket_bytes(stage, bucket) for stage in stages), 0.0, 0.0
        if method.shard != "none" and len({self._plan.degree("data", stage) for stage in stages}) == 1:
            replicas, first = self._plan.along(ranks[0], "data"), self._places[ranks[0]][1]
            seconds = network.collective(cluster, method.summing, size, replicas, None)
            bytes_ = sent(method.summing, size, len(replicas))
            size, ranks = size / len(replicas), [rank for rank in ranks if self._places[rank][1] == first]
        seconds += network.collective(cluster, "all_reduce", size, ranks, None)
        return seconds, bytes_ + sent("all_reduce", size, len(ranks))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Stage and replica of every rank."""
        return {rank: self._plan.place(rank) for stage in self._plan.stages for rank in stage.devices}

    def bucket_bytes(self, stage: int, bucket: Bucket) -> float:
        """Of the gradients of a bucket, on one rank."""
        return self._scene.bytes(stage, bucket.parameters)

    def sums_of_parameters(self, program: Program, lanes: Sequence[int]) -> list[Task]:
        """Parameters that a worker sums with its replicas after its step; nothing is computed meanwhile."""
        ranks, cluster = program.replicas, self._scene.basis.cluster
        played = tuple(i for i, rank in enumerate(lanes) if rank in ranks)
        found = list[Task]()
        for bucket in program.buckets:
            action = Action(Kind.REDUCE, program.stage, value=f"{bucket.name}.parameters")
            size = sum(self._held_bytes(program.stage, name) for name in bucket.parameters)
            seconds = network.collective(cluster, "all_reduce", size, ranks, None)
            bytes_ = int(sent("all_reduce", size, len(ranks)))
            found.append(Task(action, bytes=bytes_, transfer=Transfer(seconds, cpu=self._cpu(ranks)), lanes=played))
        return found

    def _held_bytes(self, stage: int, name: str) -> float:
        """Of a parameter as the optimizer has it: where passes run in 16 bits, of the master."""
        whole = self._scene.partition.graph.parameters[name]
        elements = math.prod(self._scene.sheet(stage).held_shape(f"parameter:{name}"))
        return elements * whole.bytes / max(1, math.prod(whole.shape))

    def _completing(self, program: Program, bucket: Bucket) -> int:
        """Of a worker's stages, the one whose last backward pass completes the gradients of a bucket."""
        return program.stage

    def _ready(self, stage: int, bucket: Bucket) -> float:
        """How much of the last backward pass is over when the gradients of a bucket are complete."""
        table, pieces = self._scene.table(stage), self._scene.pieces(stage)
        whole = sum(table.between("backward", *piece) for piece in pieces)
        uses = self._scene.basis.stages.first_uses
        first = min(uses[name] for name in bucket.parameters)
        done = sum(table.between("backward", max(a, first), b) for a, b in pieces if b > first)
        return min(1.0, done / whole) if whole else 1.0

    def hosts(self, lanes: Sequence[int]) -> list[Host]:
        """Lanes that share the cores of a host; where one rank stands for many, none do."""
        cluster = self._scene.basis.cluster
        found: dict[int, list[int]] = {}
        for lane, rank in enumerate(lanes):
            if cluster.cores(rank) is not None:
                found.setdefault(cluster.host(rank), []).append(lane)
        return [
            Host(tuple(own), cluster.cores(lanes[own[0]]) or len(own), cluster.contention(lanes[own[0]]))
            for own in found.values()
        ]


@dataclass(frozen=True)
class _Route:
    """How a value goes to a peer, or comes from one, for every microbatch.

    Attributes:
        lane: of the peer.
        size: bytes.
        transfer: how it moves.
        stages: from where to where, if one rank stands for each.
    """

    lane: int
    size: int
    transfer: Transfer
    stages: tuple[int, int] | None

    def task(self, action: Action) -> Task:
        """Of one microbatch."""
        key = None if self.stages is None else (action.value, action.microbatch, action.gradient, *self.stages)
        own = Action(action.kind, action.stage, action.microbatch, action.value, self.lane, action.gradient)
        return Task(own, bytes=self.size, key=key, transfer=self.transfer)
