"""Lanes: what the workers of a plan do in a step, action by action, with durations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.cost.network import collectives as network
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.plan_cost import PlanCost
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.task import Task, TransferTime
from polylane.program.program import GradientBucket, Program
from polylane.schedule.action import Action, ActionKind


class TaskBuilder:
    """The tasks of a plan's workers.

    Args:
        scene: the plan and its prices.
    """

    def __init__(self, scene: PlanCost) -> None:
        self._scene, self._plan = scene, scene.plan
        self._transfers: dict[Hashable, TransferTime] = {}
        self._sums: dict[Hashable, tuple[int, TransferTime, float] | None] = {}
        self._steps: dict[Hashable, tuple[float, int]] = {}

    def build_tasks(self, program: Program, lanes: Sequence[int]) -> list[Task]:
        """What a worker does, with durations; ``lanes`` are the ranks that are played."""
        last = {action.stage: action for action in program.actions if action.kind is ActionKind.BACKWARD}
        buckets = {bucket.name: bucket for bucket in program.buckets}
        travels = self._build_routes(program, lanes)
        found = list[Task]()
        for action in program.actions:
            if action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
                route = travels[action.kind, action.value, action.peer, action.gradient]
                if route is not None:
                    found.append(route.build_task(action))
            elif action.kind is ActionKind.REDUCE:
                assert action.value is not None
                bucket = buckets[action.value]
                found += self._reduction_tasks(
                    program, action, bucket, last[self._completing_stage(program, bucket)], lanes
                )
            else:
                found.append(self._compute_task(program, action))
        return found

    def _compute_task(self, program: Program, action: Action) -> Task:
        own, overhead = self._scene.predict_stage(program.stage), self._scene.basis.host_overhead
        took, sharing = own.passes, own.shard_traffic
        if action.kind is ActionKind.FORWARD:
            waits = took.waits + sharing.waits
            return Task(action, took.forward + waits + overhead, waits, int(took.sent / 2 + sharing.sent))
        if action.kind is ActionKind.BACKWARD:
            waits = took.backward_waits + sharing.backward_waits
            return Task(action, took.backward + waits + overhead, waits, int(took.sent / 2 + sharing.backward_sent))
        waits, bytes_ = self._parameter_collective(program)
        return Task(action, own.update_seconds + waits, waits, bytes_)

    def _parameter_collective(self, program: Program) -> tuple[float, int]:
        """Seconds and bytes in which replicas hand each other the parameters that each has updated, all at once."""
        key = (program.stage, program.replicas)
        if key not in self._steps:
            kind, ranks = self._scene.basis.method.parameter_collective, program.replicas
            size = sum(self.bucket_bytes(program.stage, bucket) for bucket in program.buckets)
            seconds = network.collective_seconds(self._scene.basis.cluster, kind if size else "", size, ranks, None)
            self._steps[key] = seconds, int(bytes_per_rank(kind, size, len(ranks)))
        return self._steps[key]

    def _build_routes(self, program: Program, lanes: Sequence[int]) -> dict[Hashable, _Route | None]:
        """How the messages of a worker go, the same for every microbatch, by kind, value, peer and direction.

        Where one rank stands for a whole stage, all that it sends to another stage is one message: that to the first
        of its peers there; the others are None.
        """
        folded = len(lanes) < self._plan.workers
        lane_of = {self._plan.stage_and_replica(rank)[0]: lane for lane, rank in reversed(list(enumerate(lanes)))}
        found = dict[Hashable, _Route | None]()
        seen = set[Hashable]()
        for action in program.actions:
            own = (action.kind, action.value, action.peer, action.gradient)
            if action.kind not in (ActionKind.SEND, ActionKind.RECEIVE) or own in found:
                continue
            assert action.peer is not None and action.value is not None
            other = self._plan.stage_and_replica(action.peer)[0]
            there, here = (program.stage, other) if action.kind is ActionKind.SEND else (other, program.stage)
            peers = 1
            if not folded:
                receiver = action.peer if action.kind is ActionKind.SEND else program.rank
                peers = len(self._plan.peers(receiver, there))
            elif (action.kind, action.value, other, action.gradient) in seen:
                found[own] = None
                continue
            seen.add((action.kind, action.value, other, action.gradient))
            size = (
                self._scene.sharded_graph(here).busiest_value_bytes(action.value, self._scene.local_samples(here))
                / peers
            )
            lane = lane_of[other] if folded else action.peer
            found[own] = _Route(
                lane, int(size), self._message_transfer(size, there, here), (there, here) if folded else None
            )
        return found

    def _message_transfer(self, size: float, source: int, target: int) -> TransferTime:
        """A message between ranks of two stages."""
        key = (size, source, target)
        if key not in self._transfers:
            ends = self._plan.stages[source].devices[0], self._plan.stages[target].devices[0]
            streams = len(self._plan.stages[target].devices)
            empty = network.message_seconds(self._scene.basis.cluster, 0.0, *ends)
            whole = network.message_seconds(self._scene.basis.cluster, size, *ends, streams)
            self._transfers[key] = TransferTime(whole - empty, empty, cpu=self._transfer_cores(ends))
        return self._transfers[key]

    def _transfer_cores(self, ranks: Sequence[int]) -> float:
        """Cores that what these ranks send each other keeps busy at each end."""
        return self._scene.basis.cluster.link(ranks).cpu if len(ranks) > 1 else 0.0

    def _reduction_tasks(
        self, program: Program, action: Action, bucket: GradientBucket, last: Action, lanes: Sequence[int]
    ) -> list[Task]:
        """Gradients that are summed from when the last backward pass has them all; none if the passes sum them."""
        key = (program.stage, bucket.name, bucket.ranks)
        if key not in self._sums:
            seconds, bytes_ = self._gradient_collective(bucket)
            fraction = self._ready_fraction(program.stage, bucket) if self._scene.basis.method.overlap else 1.0
            transfer = TransferTime(seconds, cpu=self._transfer_cores(bucket.ranks))
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

    def _gradient_collective(self, bucket: GradientBucket) -> tuple[float, float]:
        """Seconds and bytes that a rank sends until gradients are summed, as far as the method has it.

        Replicas that update a part each sum but that part; what else sums these gradients (ranks that split operators,
        stages that hold tied weights) then sums the parts.
        """
        cluster, method = self._scene.basis.cluster, self._scene.basis.method
        ranks: Sequence[int] = bucket.ranks
        stages = {self._stage_and_replica[rank][0] for rank in ranks}
        # Where stages have unlike parts of tied weights, the largest.
        size, seconds, bytes_ = max(self.bucket_bytes(stage, bucket) for stage in stages), 0.0, 0.0
        if method.shard != "none" and len({self._plan.degree("data", stage) for stage in stages}) == 1:
            replicas, first = self._plan.ranks_along(ranks[0], "data"), self._stage_and_replica[ranks[0]][1]
            seconds = network.collective_seconds(cluster, method.gradient_collective, size, replicas, None)
            bytes_ = bytes_per_rank(method.gradient_collective, size, len(replicas))
            size, ranks = size / len(replicas), [rank for rank in ranks if self._stage_and_replica[rank][1] == first]
        seconds += network.collective_seconds(cluster, "all_reduce", size, ranks, None)
        return seconds, bytes_ + bytes_per_rank("all_reduce", size, len(ranks))

    @cached_property
    def _stage_and_replica(self) -> dict[int, tuple[int, int]]:
        """Stage and replica of every rank."""
        return {rank: self._plan.stage_and_replica(rank) for stage in self._plan.stages for rank in stage.devices}

    def bucket_bytes(self, stage: int, bucket: GradientBucket) -> float:
        """Of the gradients of a bucket, on one rank."""
        return self._scene.parameter_bytes(stage, bucket.parameters)

    def build_averaging_tasks(self, program: Program, lanes: Sequence[int]) -> list[Task]:
        """Parameters that a worker sums with its replicas after its step; nothing is computed meanwhile."""
        ranks, cluster = program.replicas, self._scene.basis.cluster
        played = tuple(i for i, rank in enumerate(lanes) if rank in ranks)
        found = list[Task]()
        for bucket in program.buckets:
            action = Action(ActionKind.REDUCE, program.stage, value=f"{bucket.name}.parameters")
            size = sum(self._master_bytes(program.stage, name) for name in bucket.parameters)
            seconds = network.collective_seconds(cluster, "all_reduce", size, ranks, None)
            bytes_ = int(bytes_per_rank("all_reduce", size, len(ranks)))
            found.append(
                Task(
                    action, bytes=bytes_, transfer=TransferTime(seconds, cpu=self._transfer_cores(ranks)), lanes=played
                )
            )
        return found

    def _master_bytes(self, stage: int, name: str) -> float:
        """Of a parameter as the optimizer has it: where passes run in 16 bits, of the master."""
        whole = self._scene.partition.graph.parameters[name]
        elements = math.prod(self._scene.sharded_graph(stage).busiest_shape(f"parameter:{name}"))
        return elements * whole.bytes / max(1, math.prod(whole.shape))

    def _completing_stage(self, program: Program, bucket: GradientBucket) -> int:
        """Of a worker's stages, the one whose last backward pass completes the gradients of a bucket."""
        return program.stage

    def _ready_fraction(self, stage: int, bucket: GradientBucket) -> float:
        """How much of the last backward pass is over when the gradients of a bucket are complete."""
        table, pieces = self._scene.table(stage), self._scene.node_ranges(stage)
        whole = sum(table.between("backward", *piece) for piece in pieces)
        uses = self._scene.basis.stages.first_uses
        first = min(uses[name] for name in bucket.parameters)
        done = sum(table.between("backward", max(a, first), b) for a, b in pieces if b > first)
        return min(1.0, done / whole) if whole else 1.0

    def build_hosts(self, lanes: Sequence[int]) -> list[SharedCores]:
        """Lanes that share the cores of a host; where one rank stands for many, none do."""
        cluster = self._scene.basis.cluster
        found: dict[int, list[int]] = {}
        for lane, rank in enumerate(lanes):
            if cluster.cores(rank) is not None:
                found.setdefault(cluster.host(rank), []).append(lane)
        return [
            SharedCores(tuple(own), cluster.cores(lanes[own[0]]) or len(own), cluster.contention(lanes[own[0]]))
            for own in found.values()
        ]


@dataclass(frozen=True)
class _Route:
    """How a value goes to a peer, or comes from one, for every microbatch.

    Attributes:
        peer_lane: of the peer.
        size: bytes.
        transfer: how it moves.
        stages: from where to where, if one rank stands for each.
    """

    peer_lane: int
    size: int
    transfer: TransferTime
    stages: tuple[int, int] | None

    def build_task(self, action: Action) -> Task:
        """Of one microbatch."""
        key = None if self.stages is None else (action.value, action.microbatch, action.gradient, *self.stages)
        own = Action(action.kind, action.stage, action.microbatch, action.value, self.peer_lane, action.gradient)
        return Task(own, bytes=self.size, key=key, transfer=self.transfer)
