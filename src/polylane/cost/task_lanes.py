"""Simulator input: the actions of each worker's program as tasks with predicted durations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from polylane.cost.network import collectives as network
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.network.compressed_reduction import CompressedReduction, codec_of, price_compressed
from polylane.cost.network.sync_volume import TrainedTensor
from polylane.cost.plan_cost import PlanCost
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.task import Task, TransferTime
from polylane.graph.sparse_gradients import count_exchanged_rows
from polylane.program.program import GradientBucket, Program
from polylane.schedule.action import WEIGHT_PASSES, Action, ActionKind

# Key of the optimizer's step among the tasks that compression makes longer, and the name of the outer one.
STEP, OUTER = "step", "outer"
# Passes over the parameters' bytes in an outer step: difference to the anchor (3), Nesterov's momentum and update (7),
# and the result copied into the weights (2).
OUTER_PASSES = 12


class TaskBuilder:
    """Builds the tasks of a plan's workers.

    Args:
        scene: costs of the plan's stages.
        lanes: the ranks that are simulated.
    """

    def __init__(self, scene: PlanCost, lanes: Sequence[int]) -> None:
        self._scene, self._plan, self._lanes = scene, scene.plan, lanes
        self._transfers: dict[Hashable, TransferTime] = {}
        self._sums: dict[Hashable, tuple[int, TransferTime, float] | None] = {}
        self._steps: dict[Hashable, tuple[float, int]] = {}
        self._codecs: dict[Hashable, CompressedReduction] = {}

    def build_tasks(self, program: Program) -> list[Task]:
        """Return the tasks of a worker's program."""
        # The latest backward pass of a stage: reductions of its gradients can begin in the course of it.
        last_passes = dict[int, Action]()
        buckets = {bucket.name: bucket for bucket in program.buckets}
        travels = self._build_routes(program)
        tasks, codecs = list[Task](), defaultdict[Hashable, float](float)
        for action in program.actions:
            if action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
                route = travels[action.kind, action.value, action.peer, action.gradient]
                if route is not None:
                    tasks.append(route.build_task(action))
            elif action.kind is ActionKind.REDUCE:
                assert action.value is not None
                bucket = buckets[action.value]
                ending = last_passes[self._completing_stage(program, bucket)]
                tasks += self._reduction_tasks(program, action, bucket, ending)
                for at, seconds in zip((ending, STEP), self._codec_seconds(program, bucket), strict=True):
                    codecs[at] += seconds
            else:
                tasks.append(self._compute_task(program, action))
                if action.kind in WEIGHT_PASSES:
                    last_passes[action.stage] = action
        return self._with_codecs(tasks, codecs) if any(codecs.values()) else tasks

    @staticmethod
    def _with_codecs(tasks: Sequence[Task], codecs: Mapping[Hashable, float]) -> list[Task]:
        """Return the tasks with the seconds of compression in the passes that complete gradients, and in the step."""
        keys = ((STEP if task.action.kind is ActionKind.STEP else task.action) for task in tasks)
        return [
            replace(task, seconds=task.seconds + codecs[key]) if key in codecs else task
            for task, key in zip(tasks, keys, strict=True)
        ]

    def _codec_seconds(self, program: Program, bucket: GradientBucket) -> tuple[float, float]:
        """Return the seconds to compress a bucket's gradients, and those to decompress their sum."""
        reduction = self._compressed(program, bucket)
        return (0.0, 0.0) if reduction is None else (reduction.packing, reduction.unpacking)

    def _compressed(self, program: Program, bucket: GradientBucket) -> CompressedReduction | None:
        """Return the price of a bucket that replicas sum compressed; None for one that is summed as it is."""
        scene, sync = self._scene, self._plan.sync
        if (
            not codec_of(sync)
            or bucket.is_sparse
            or set(bucket.ranks) != set(program.replicas)
            or len(bucket.ranks) == 1
        ):
            return None
        key = (program.stage, bucket.name, bucket.ranks)
        if key not in self._codecs:
            device = scene.basis.slowest_device(self._plan.stages[program.stage].devices)
            tensors = bucket_tensors(scene, program, bucket)
            self._codecs[key] = price_compressed(sync, tensors, bucket.ranks, scene.basis.cluster, device)
        return self._codecs[key]

    def _compute_task(self, program: Program, action: Action) -> Task:
        # The optimizer steps once for all stages of a worker; passes are priced by stage.
        (took, sharing), overhead = self._scene.pass_costs(action.stage), self._scene.basis.host_overhead
        if action.kind is ActionKind.FORWARD:
            # ``took.sent`` is the sum of both passes: half for each.
            waits = took.waits + sharing.waits
            return Task(action, took.forward + waits + overhead, waits, int(took.sent / 2 + sharing.sent))
        if action.kind is ActionKind.BACKWARD:
            waits = took.backward_waits + sharing.backward_waits
            return Task(action, took.backward + waits + overhead, waits, int(took.sent / 2 + sharing.backward_sent))
        # In two halves: collectives of operators are in the first, those that reduce gradients in the second.
        if action.kind is ActionKind.BACKWARD_INPUT:
            waits = took.backward_waits
            return Task(action, took.backward_input + waits + overhead, waits, int(took.sent / 2))
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            waits = sharing.backward_waits
            return Task(action, took.second_half + waits + overhead, waits, int(sharing.backward_sent))
        waits, bytes_ = self._parameter_collective(program)
        if statistics := self._scene.kept_statistics_bytes(program.stage):
            waits += network.collective_seconds(
                self._scene.basis.cluster, "all_reduce", statistics, program.replicas, None
            )
            bytes_ += int(bytes_per_rank("all_reduce", statistics, len(program.replicas)))
        return Task(action, self._scene.predict_stage(program.stage).update_seconds + waits, waits, bytes_)

    def _parameter_collective(self, program: Program) -> tuple[float, int]:
        """Return seconds and bytes of the all-gather of updated parameters (ZeRO-1 and ZeRO-2), all buckets at once."""
        sharding = self._scene.sharding(program.stage)
        ranks = sharding.group(program.replicas, program.replica)
        key = (program.stage, tuple(ranks))
        if key not in self._steps:
            kind = sharding.parameter_collective
            size = sum(self._scene.parameter_bytes(program.stage, bucket.parameters) for bucket in program.buckets)
            seconds = network.collective_seconds(self._scene.basis.cluster, kind if size else "", size, ranks, None)
            self._steps[key] = seconds, int(bytes_per_rank(kind, size, len(ranks)))
        return self._steps[key]

    def _build_routes(self, program: Program) -> dict[Hashable, _Route | None]:
        """Return the routes of a worker's messages, equal for every microbatch, by kind, value, peer and direction.

        Where one rank stands for a whole stage (folded lanes), a value that goes to several peers of another stage is
        one message, to the first of them; the routes to the others are None.
        """
        folded = len(self._lanes) < self._plan.workers
        # Reversed, so that the first lane of a stage wins.
        lane_of = {self._stands_for(rank): lane for lane, rank in reversed(list(enumerate(self._lanes)))}
        routes = dict[Hashable, _Route | None]()
        seen_messages = set[Hashable]()
        for action in program.actions:
            key = (action.kind, action.value, action.peer, action.gradient)
            if action.kind not in (ActionKind.SEND, ActionKind.RECEIVE) or key in routes:
                continue
            assert action.peer is not None and action.value is not None
            group = self._stands_for(action.peer)
            stage = group[0]
            source, target = (program.stage, stage) if action.kind is ActionKind.SEND else (stage, program.stage)
            # Unfolded: a value is resharded box by box, so each of the receiver's peers sends it an equal
            # part.
            peers = 1
            if not folded:
                receiver = action.peer if action.kind is ActionKind.SEND else program.rank
                peers = len(self._plan.peers(receiver, source, action.microbatch))
            elif (action.kind, action.value, group, action.gradient) in seen_messages:
                routes[key] = None
                continue
            seen_messages.add((action.kind, action.value, group, action.gradient))
            value_bytes = self._scene.sharded_graph(target).busiest_value_bytes(
                action.value, self._scene.local_samples(target)
            )
            size = value_bytes / peers
            lane = lane_of[group] if folded else action.peer
            routes[key] = _Route(
                lane, int(size), self._message_transfer(size, source, target), (source, target) if folded else None
            )
        return routes

    def _stands_for(self, rank: int) -> tuple[int, int]:
        """Return the stage of a rank, and its replica where each has microbatches of its own."""
        stage, replica = self._plan.stage_and_replica(rank)
        return stage, replica if self._plan.takes_turns else 0

    def _message_transfer(self, size: float, source: int, target: int) -> TransferTime:
        """Return the transfer of a message between ranks of two stages."""
        key = (size, source, target)
        if key not in self._transfers:
            # All ranks of the receiving stage are sent to at the same time, over the same links.
            ends = self._plan.stages[source].devices[0], self._plan.stages[target].devices[0]
            streams = len(self._plan.stages[target].devices)
            empty = network.message_seconds(self._scene.basis.cluster, 0.0, *ends)
            seconds = network.message_seconds(self._scene.basis.cluster, size, *ends, streams)
            self._transfers[key] = TransferTime(seconds - empty, empty, cpu=self._transfer_cores(ends))
        return self._transfers[key]

    def _transfer_cores(self, ranks: Sequence[int]) -> float:
        """Return how many cores a transfer between these ranks keeps busy at each end."""
        return self._scene.basis.cluster.link(ranks).cpu if len(ranks) > 1 else 0.0

    def _reduction_tasks(self, program: Program, action: Action, bucket: GradientBucket, ending: Action) -> list[Task]:
        """Return the reduction of a bucket once the last backward pass completes it; none if the passes reduce it."""
        key = (program.stage, bucket.name, bucket.ranks)
        if key not in self._sums:
            packed, overlap = self._compressed(program, bucket), self._scene.basis.method.overlap
            if bucket.is_sparse:
                seconds, bytes_ = self._sparse_exchange(program, bucket)
            else:
                seconds, bytes_ = (packed.seconds, packed.bytes) if packed else self._gradient_collective(bucket)
            fraction = self._ready_fraction(ending.stage, bucket, ending.kind) if overlap else 1.0
            transfer = TransferTime(seconds, cpu=self._transfer_cores(bucket.ranks))
            self._sums[key] = (int(bytes_), transfer, fraction) if seconds or bytes_ else None
        cost = self._sums[key]
        if cost is None:
            return []
        bytes_, transfer, fraction = cost
        task = Task(
            action,
            bytes=bytes_,
            transfer=transfer,
            lanes=self._lanes_of(bucket.ranks),
            after=ending,
            fraction=fraction,
            overlapped=self._scene.basis.method.overlap,
        )
        return [task]

    def _sparse_exchange(self, program: Program, bucket: GradientBucket) -> tuple[float, float]:
        """Return seconds and bytes of the exchange of a sparse gradient's rows: their number, indices, and values."""
        (table,), cluster = bucket_tensors(self._scene, program, bucket), self._scene.basis.cluster
        if table.ranks == 1:
            return 0.0, 0.0
        rows = table.sparse_rows or 0
        messages = (8, 8 * rows, table.nbytes // max(1, table.shape[0]) * rows)
        seconds = sum(
            network.collective_seconds(cluster, "all_gather", size * table.ranks, bucket.ranks, None)
            for size in messages
        )
        return seconds, table.gradient_sum_bytes

    def _gradient_collective(self, bucket: GradientBucket) -> tuple[float, float]:
        """Return the seconds of a bucket's gradient reduction, and the bytes that a rank sends in it.

        With sharded optimizer states the gradients are reduce-scattered over the replicas; all other ranks that
        contribute to them (of operator axes, of stages with tied weights) then all-reduce the shards.
        """
        cluster, ranks = self._scene.basis.cluster, bucket.ranks
        stages = {self._stage_and_replica[rank][0] for rank in ranks}
        # Stages with tied weights may shard them differently: the largest local size counts.
        size, seconds, bytes_ = max(self._scene.parameter_bytes(stage, bucket.parameters) for stage in stages), 0.0, 0.0
        sharding = self._scene.sharding(min(stages))
        # Two steps: reduce-scatter over a sharding group of one stage, then all-reduce of the shards over the
        # rest: the ranks that hold the same shard.
        if sharding.kind != "none" and len({self._plan.degree("data", stage) for stage in stages}) == 1:
            replica, degree = self._stage_and_replica[ranks[0]][1], sharding.degree
            group = sharding.group(self._plan.ranks_along(ranks[0], "data"), replica)
            seconds = network.collective_seconds(cluster, sharding.gradient_collective, size, group, None)
            bytes_ = bytes_per_rank(sharding.gradient_collective, size, degree)
            size, shard = size / degree, replica % degree
            ranks = tuple(rank for rank in ranks if self._stage_and_replica[rank][1] % degree == shard)
        seconds += network.collective_seconds(cluster, "all_reduce", size, ranks, None)
        return seconds, bytes_ + bytes_per_rank("all_reduce", size, len(ranks))

    @cached_property
    def _stage_and_replica(self) -> dict[int, tuple[int, int]]:
        """Stage and replica index of every rank."""
        return {rank: self._plan.stage_and_replica(rank) for stage in self._plan.stages for rank in stage.devices}

    def _lanes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the lanes that show these ranks."""
        return tuple(lane for lane, rank in enumerate(self._lanes) if rank in ranks)

    def build_averaging_tasks(self, program: Program) -> list[Task]:
        """Return the parameter averaging after a worker's step (local SGD); it does not overlap with computation."""
        ranks, cluster = program.replicas, self._scene.basis.cluster
        played, tasks = self._lanes_of(ranks), list[Task]()
        for bucket in program.buckets:
            action = Action(ActionKind.REDUCE, program.stage, value=f"{bucket.name}.parameters")
            size = sum(self._master_bytes(program.stage, name) for name in bucket.parameters)
            seconds = network.collective_seconds(cluster, "all_reduce", size, ranks, None)
            transfer = TransferTime(seconds, cpu=self._transfer_cores(ranks))
            bytes_ = int(bytes_per_rank("all_reduce", size, len(ranks)))
            tasks.append(Task(action, bytes=bytes_, transfer=transfer, lanes=played))
        return [*tasks, *self._outer_step(program)]

    def _outer_step(self, program: Program) -> list[Task]:
        """Return the outer optimizer's step on the averaged change of the weights (DiLoCo); none without one."""
        if self._plan.sync.outer is None:
            return []
        size = sum(self._master_bytes(program.stage, name) for bucket in program.buckets for name in bucket.parameters)
        device = self._scene.basis.slowest_device(self._plan.stages[program.stage].devices)
        return [Task(Action(ActionKind.STEP, program.stage, value=OUTER), OUTER_PASSES * size / device.stream)]

    def _master_bytes(self, stage: int, name: str) -> float:
        """Return the local bytes of a parameter as the optimizer holds it: of the float32 master for 16-bit passes."""
        parameter = self._scene.partition.graph.parameters[name]
        elements = math.prod(self._scene.sharded_graph(stage).busiest_shape(f"parameter:{name}"))
        return elements * parameter.bytes / max(1, math.prod(parameter.shape))

    def _completing_stage(self, program: Program, bucket: GradientBucket) -> int:
        """Return the worker's stage whose last backward pass completes the gradients of a bucket.

        It is the first that reads its parameters; a tied weight's is reduced behind all others of the worker, and so
        are compressed ones.
        """
        chunks, stages = program.stages, {self._stage_and_replica[rank][0] for rank in bucket.ranks}
        at_once = codec_of(self._plan.sync) or not self._scene.basis.method.overlap
        if len(chunks) == 1 or len(stages) > 1 or at_once:
            return program.stage
        return next((s for s in chunks if not self._parameters_read[s].isdisjoint(bucket.parameters)), chunks[0])

    @cached_property
    def _parameters_read(self) -> list[set[str]]:
        """Names of the parameters that each stage reads."""
        return [set(self._scene.partition.parameters(stage)) for stage in range(self._scene.partition.stages)]

    def _ready_fraction(self, stage: int, bucket: GradientBucket, kind: ActionKind) -> float:
        """Return the fraction of the last backward pass after which the gradients of a bucket are complete."""
        table, pieces = self._scene.table(stage), self._scene.node_ranges(stage)
        pass_name = "backward_weight" if kind is ActionKind.BACKWARD_WEIGHT else "backward"
        total = sum(table.between(pass_name, *piece) for piece in pieces)
        uses = self._scene.basis.stages.first_uses
        # The backward pass runs from the last node to the first: a bucket is complete once the earliest
        # reader of its parameters has run.
        first_node = min(uses[name] for name in bucket.parameters)
        seconds = sum(table.between(pass_name, max(a, first_node), b) for a, b in pieces if b > first_node)
        return min(1.0, seconds / total) if total else 1.0

    def build_hosts(self) -> list[SharedCores]:
        """Return the lanes that share the cores of each host."""
        cluster, lanes = self._scene.basis.cluster, self._lanes
        host_lanes: dict[int, list[int]] = {}
        for lane, rank in enumerate(lanes):
            if cluster.cores(rank) is not None:
                host_lanes.setdefault(cluster.host(rank), []).append(lane)
        return [
            SharedCores(tuple(group), cluster.cores(lanes[group[0]]) or len(group), cluster.contention(lanes[group[0]]))
            for group in host_lanes.values()
        ]


@dataclass(frozen=True)
class _Route:
    """A message of every microbatch, sent to a peer or received from one.

    Attributes:
        peer_lane: index of the peer's lane, or its rank.
        size: bytes of one message.
        transfer: undisturbed duration and cores of the message.
        stages: sending and receiving stage, if one rank stands for each; else None.
    """

    peer_lane: int
    size: int
    transfer: TransferTime
    stages: tuple[int, int] | None

    def build_task(self, action: Action) -> Task:
        """Return the task of one microbatch."""
        # Between folded lanes the ranks of an action do not match lanes, so the key names stages instead.
        key = None if self.stages is None else (action.value, action.microbatch, action.gradient, *self.stages)
        message = Action(action.kind, action.stage, action.microbatch, action.value, self.peer_lane, action.gradient)
        return Task(message, bytes=self.size, key=key, transfer=self.transfer)


def bucket_tensors(scene: PlanCost, program: Program, bucket: GradientBucket) -> list[TrainedTensor]:
    """Return the gradients of a bucket on a worker, in the dtype that the optimizer holds the parameters in.

    Args:
        scene: costs of the plan's stages, with the shards of their parameters.
        program: the program of the worker.
        bucket: one of its buckets, with the ranks that sum it.
    """
    only_replicas = set(bucket.ranks) == set(program.replicas)
    graph, sheet, tensors = scene.partition.graph, scene.sharded_graph(program.stage), list[TrainedTensor]()
    for name in bucket.parameters:
        info, shape = graph.parameters[name], sheet.busiest_shape(f"parameter:{name}")
        item = info.bytes // max(1, math.prod(info.shape))
        samples = scene.batch / len(program.replicas)
        rows = count_exchanged_rows(graph, name, samples) if bucket.is_sparse else None
        tensors.append(TrainedTensor(shape, item, len(bucket.ranks), only_replicas, sparse_rows=rows))
    return tensors
