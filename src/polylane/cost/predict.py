"""Predict a step: the programs that the workers would run, played over what everything takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost import network
from polylane.cost.communicate import sent
from polylane.cost.host import Host
from polylane.cost.memory import Load, Margin, Memory, memory
from polylane.cost.memory import recomputed as recomputed_need
from polylane.cost.method import Method
from polylane.cost.optimizer_state import OptimizerState
from polylane.cost.play import play
from polylane.cost.residence import Need
from polylane.cost.stage import Passes, Stages, Weights, passes, recomputed
from polylane.cost.table import Clock, Exchange, Sheet, Table
from polylane.cost.task import Task, Transfer
from polylane.graph.partition import Partition
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees
from polylane.program.lower import BUCKET_BYTES, lower
from polylane.program.program import Bucket, Program
from polylane.schedule.action import Action, Kind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import live_bound

# Up to so many workers each has a lane of its own where that is asked for.
LANES = 64


@dataclass(frozen=True)
class Basis:
    """What predictions rest on.

    Attributes:
        cluster: the devices and what links them.
        stages: prices of the graph.
        method: how training is done.
        clock: how long operators take on a device.
        update: seconds that the optimizer takes for so many trained elements in so many tensors on a device.
        optimizer: what it keeps for each parameter.
        margin: memory that is lost beyond the tensors.
        overhead: seconds of the host from one pass of a microbatch to the next, beyond its operators.
    """

    cluster: Cluster
    stages: Stages
    method: Method
    clock: Callable[[Device], Clock]
    update: Callable[[Device, int, int], float]
    optimizer: OptimizerState
    margin: Margin
    overhead: float = 0.0


@dataclass(frozen=True)
class StagePrediction:
    """What one rank of a stage takes and does, the busiest.

    Attributes:
        mesh: of the stage.
        samples: in hand for each microbatch.
        passes: of one microbatch.
        weights: that it holds.
        update: seconds of the optimizer.
        memory: that it needs at most.
    """

    mesh: Degrees
    samples: int
    passes: Passes
    weights: Weights
    update: float
    memory: Memory


@dataclass(frozen=True)
class Prediction:
    """A step of a plan on a cluster.

    Attributes:
        plan: what runs.
        timeline: a lane for every worker, or for one of each stage where they are many (``lanes`` says which ranks).
        stages: what each stage's busiest rank does.
        batch: samples of a step.
    """

    plan: Plan
    timeline: Timeline
    stages: tuple[StagePrediction, ...]
    batch: int
    lanes: tuple[int, ...]

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.makespan()

    @cached_property
    def utilization(self) -> float:
        """Of all workers' time, how much is work: from 0 to 1."""
        busy, of = self.timeline.busy(), [self.plan.place(rank)[0] for rank in self.lanes]
        workers = [len(self.plan.stages[stage].devices) / of.count(stage) for stage in of]
        area = self.seconds * self.plan.workers
        return sum(b * n for b, n in zip(busy, workers, strict=True)) / area if area else 0.0

    @property
    def samples_per_second(self) -> float:
        """Of all workers together."""
        return self.batch / self.seconds if self.seconds else 0.0


def predict(
    basis: Basis, partition: Partition, plan: Plan, batch: int, every: bool = False, exact: bool = True
) -> Prediction:
    """The time of one step.

    Workers that are alike are played once: one of each stage, unless they share cores, or their devices differ.

    Args:
        basis: what the prediction rests on.
        partition: the graph and its cuts.
        plan: what runs where.
        batch: samples of a step, over all replicas.
        every: a lane for every worker (up to :data:`LANES`), whether they are alike or not.
        exact: memory is that of the samples in hand; else in proportion to those that the graph was captured with.
    """
    scene = _Scene(basis, partition, plan, batch, exact)
    ranks = range(plan.workers)
    unlike = len(basis.cluster.devices(ranks)) > 1 or basis.cluster.cores(0) is not None
    single = (every or unlike) and plan.workers <= LANES
    lanes = tuple(ranks) if single else tuple(stage.devices[0] for stage in plan.stages)
    partials = tuple(scene.partial(stage) for stage in range(plan.pipeline))
    programs = lower(partition, plan, None, partials, only=None if single else lanes)
    by_rank = {program.rank: program for program in programs}
    tasks = [scene.tasks(by_rank[rank], lanes) for rank in lanes]
    timeline = play(tasks, scene.hosts(lanes) if single else ())
    return Prediction(plan, timeline, tuple(scene.stage(s) for s in range(plan.pipeline)), batch, lanes)


def table_of(basis: Basis, partition: Partition, plan: Plan, batch: int, stage: int) -> Table:
    """What every node of the graph takes on a rank of one of a plan's stages."""
    return _Scene(basis, partition, plan, batch).table(stage)


class _Scene:
    """One plan on one cluster: prices of its stages, and the tasks of its workers."""

    def __init__(self, basis: Basis, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        self.exact = exact
        self.basis, self.partition, self.plan, self.batch = basis, partition, plan, batch
        self._priced: dict[int, StagePrediction] = {}
        self._transfers: dict[Hashable, Transfer] = {}
        self._sums: dict[Hashable, tuple[int, Transfer, float]] = {}
        self._tables: dict[int, Table] = {}
        self.order = StageGraph.of_partition(partition)

    # ---- stages ------------------------------------------------------------------------------------------------------

    def samples(self, stage: int) -> int:
        """That a replica of a stage has in hand for each microbatch, at most."""
        return -(-self.batch // (self.plan.microbatches * self.plan.degree("data", stage)))

    def pieces(self, stage: int) -> list[tuple[int, int]]:
        return [(first, end) for first, end, owner in self.partition.pieces if owner == stage]

    def table(self, stage: int) -> Table:
        if stage not in self._tables:
            self._tables[stage] = self._table(stage)
        return self._tables[stage]

    def _table(self, stage: int) -> Table:
        mesh, rank = self.plan.degrees(stage), self.plan.stages[stage].devices[0]
        axes = ("data", *self.plan.axes_of(stage)) if mesh.data > 1 else self.plan.axes_of(stage)
        groups = {axis: self.plan.along(rank, axis) for axis in axes}
        device = self.device(stage)
        exchange = {axis: self._exchange(ranks) for axis, ranks in groups.items()}
        where = (device.kind, device.speed, tuple((a, self.basis.cluster.span(r)) for a, r in groups.items()))
        rates = network.rates(self.basis.cluster, self.plan.stages[stage].devices[:2], self.basis.method.dtype)
        return self.basis.stages.table(mesh, self.samples(stage), where, self.basis.clock(device), exchange, rates)

    def device(self, stage: int) -> Device:
        """The slowest of a stage's devices: all others wait for it."""
        found = self.basis.cluster.devices(self.plan.stages[stage].devices)
        return min(found, key=lambda device: device.speed * max(device.achieved.values()))

    def _exchange(self, ranks: Sequence[int]) -> Exchange:
        def seconds(collective: str, size: float) -> float:
            if collective == "message":
                return network.transfer(self.basis.cluster, size, ranks[0], ranks[1])
            return network.collective(self.basis.cluster, collective, size, ranks, None)

        return seconds

    def partial(self, stage: int) -> Mapping[str, tuple[str, ...]]:
        """Parameters whose gradients are summands along axes of a stage's mesh."""
        return self.basis.stages.summed(self.plan.degrees(stage))

    def stage(self, stage: int) -> StagePrediction:
        """What a stage's busiest rank does."""
        if stage not in self._priced:
            table, pieces, mesh = self.table(stage), self.pieces(stage), self.plan.degrees(stage)
            own = passes(table, pieces)
            if self.basis.method.recompute == "full":
                own = recomputed(own)
            weights = self.basis.stages.weights(mesh, pieces)
            update = self.basis.update(self.device(stage), weights.trained, weights.tensors)
            memory = self.memory(stage)
            self._priced[stage] = StagePrediction(mesh, self.samples(stage), own, weights, update, memory)
        return self._priced[stage]

    def memory(self, stage: int) -> Memory:
        """What a stage's busiest rank holds at most."""
        basis, plan, mesh, pieces = self.basis, self.plan, self.plan.degrees(stage), self.pieces(stage)

        def held(ranges: Sequence[tuple[int, int]]) -> Need:
            return basis.stages.need(mesh, self.samples(stage), ranges, self.exact)

        need = held(pieces)
        if basis.method.recompute == "full":
            bounds = [(a, b) for piece in pieces for a, b in itertools.pairwise(self._blocks(piece))]
            need = recomputed_need(need, [held([each]) for each in bounds])
        live = live_bound(plan.schedule, self.order, plan.microbatches, stage)
        return memory(need, self._load(stage), live, plan.microbatches, basis.method, mesh.data, basis.margin)

    def _blocks(self, piece: tuple[int, int]) -> list[int]:
        first, end = piece
        return [first, *(p for p in self.basis.stages.blocks if first < p < end), end]

    def _load(self, stage: int) -> Load:
        """What a rank of a stage trains, in bytes."""
        graph, sheet = self.partition.graph, self._sheet(stage)
        names = [name for name in self.partition.parameters(stage) if graph.parameters[name].trainable]
        shapes = {name: sheet.held_shape(f"parameter:{name}") for name in names}
        item = {name: graph.parameters[name].bytes // max(1, math.prod(graph.parameters[name].shape)) for name in names}
        sizes = {name: math.prod(shapes[name]) * item[name] for name in names}
        frozen = [n for n in self.partition.parameters(stage) if n not in sizes]
        fixed = sum(graph.parameters[n].bytes for n in frozen)
        fixed += sum(graph.buffers[n].bytes for n in self.partition.buffers(stage))
        fixed += sum(constant.nbytes for constant in graph.code.constants.values())
        trained = sum(sizes.values())
        shared = self.plan.degree("data", stage) > 1
        copied = sum(size for size in sizes.values() if size <= BUCKET_BYTES) if shared else 0
        positions = self.basis.stages.first_uses
        blocks = [b for piece in self.pieces(stage) for b in itertools.pairwise(self._blocks(piece))]
        block = max((sum(n for p, n in sizes.items() if a <= positions[p] < b) for a, b in blocks), default=0)
        return Load(
            fixed + trained,
            trained,
            sum(self.basis.optimizer.bytes(name, shapes[name]) for name in names),
            self.basis.optimizer.step(list(sizes.values())),
            copied,
            block,
        )

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def tasks(self, program: Program, lanes: Sequence[int]) -> list[Task]:
        """What a worker does, with durations; ``lanes`` are the ranks that are played."""
        last = max(i for i, a in enumerate(program.actions) if a.kind is Kind.BACKWARD)
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
                found.append(self._reduces(program, action, buckets[action.value], program.actions[last], lanes))
            else:
                found.append(self._computes(program.stage, action))
        return found

    def _computes(self, stage: int, action: Action) -> Task:
        own, overhead = self.stage(stage), self.basis.overhead
        if action.kind is Kind.FORWARD:
            took = own.passes
            return Task(action, took.forward + took.waits + overhead, took.waits, int(took.sent / 2))
        if action.kind is Kind.BACKWARD:
            took = own.passes
            return Task(action, took.backward + took.backward_waits + overhead, took.backward_waits, int(took.sent / 2))
        return Task(action, own.update)

    def _routes(self, program: Program, lanes: Sequence[int]) -> dict[Hashable, _Route | None]:
        """How the messages of a worker go, the same for every microbatch, by kind, value, peer and direction.

        Where one rank stands for a whole stage, all that it sends to another stage is one message: that to the first
        of its peers there; the others are None.
        """
        folded = len(lanes) < self.plan.workers
        lane_of = {self.plan.place(rank)[0]: lane for lane, rank in reversed(list(enumerate(lanes)))}
        found = dict[Hashable, _Route | None]()
        seen = set[Hashable]()
        for action in program.actions:
            own = (action.kind, action.value, action.peer, action.gradient)
            if action.kind not in (Kind.SEND, Kind.RECEIVE) or own in found:
                continue
            assert action.peer is not None and action.value is not None
            other = self.plan.place(action.peer)[0]
            there, here = (program.stage, other) if action.kind is Kind.SEND else (other, program.stage)
            peers = 1
            if not folded:
                receiver = action.peer if action.kind is Kind.SEND else program.rank
                peers = len(self.plan.peers(receiver, there))
            elif (action.kind, action.value, other, action.gradient) in seen:
                found[own] = None
                continue
            seen.add((action.kind, action.value, other, action.gradient))
            size = self._sheet(here).value(action.value, self.samples(here)) / peers
            lane = lane_of[other] if folded else action.peer
            found[own] = _Route(lane, int(size), self._transfer(size, there, here), (there, here) if folded else None)
        return found

    def _sheet(self, stage: int) -> Sheet:
        return self.basis.stages.sheet(self.plan.degrees(stage))

    def _transfer(self, size: float, source: int, target: int) -> Transfer:
        """A message between ranks of two stages."""
        key = (size, source, target)
        if key not in self._transfers:
            ends = self.plan.stages[source].devices[0], self.plan.stages[target].devices[0]
            streams = len(self.plan.stages[target].devices)
            empty = network.transfer(self.basis.cluster, 0.0, *ends)
            whole = network.transfer(self.basis.cluster, size, *ends, streams)
            self._transfers[key] = Transfer(whole - empty, empty, cpu=self._cpu(ends))
        return self._transfers[key]

    def _cpu(self, ranks: Sequence[int]) -> float:
        """Cores that what these ranks send each other keeps busy at each end."""
        return self.basis.cluster.link(ranks).cpu if len(ranks) > 1 else 0.0

    def _reduces(self, program: Program, action: Action, bucket: Bucket, last: Action, lanes: Sequence[int]) -> Task:
        """Gradients that are summed from when the last backward pass has them all."""
        key = (program.stage, bucket.name)
        if key not in self._sums:
            size = self.bucket_bytes(program.stage, bucket)
            seconds = network.collective(self.basis.cluster, "all_reduce", size, bucket.ranks, None)
            fraction = self._ready(program.stage, bucket) if self.basis.method.overlap else 1.0
            bytes_ = int(sent("all_reduce", size, len(bucket.ranks)))
            self._sums[key] = bytes_, Transfer(seconds, cpu=self._cpu(bucket.ranks)), fraction
        bytes_, transfer, fraction = self._sums[key]
        return Task(
            action,
            bytes=bytes_,
            transfer=transfer,
            lanes=tuple(i for i, rank in enumerate(lanes) if rank in bucket.ranks),
            after=last,
            fraction=fraction,
            overlapped=self.basis.method.overlap,
        )

    def bucket_bytes(self, stage: int, bucket: Bucket) -> float:
        """Of the gradients of a bucket, on one rank."""
        sheet = self._sheet(stage)
        return sum(sheet.bytes((f"parameter:{name}", 0), sheet.view.samples) for name in bucket.parameters)

    def _ready(self, stage: int, bucket: Bucket) -> float:
        """How much of the last backward pass is over when the gradients of a bucket are complete."""
        table, pieces = self.table(stage), self.pieces(stage)
        whole = sum(table.between("backward", *piece) for piece in pieces)
        uses = self.basis.stages.first_uses
        first = min(uses[name] for name in bucket.parameters)
        done = sum(table.between("backward", max(a, first), b) for a, b in pieces if b > first)
        return min(1.0, done / whole) if whole else 1.0

    def hosts(self, lanes: Sequence[int]) -> list[Host]:
        """Lanes that share the cores of a host; where one rank stands for many, none do."""
        cluster = self.basis.cluster
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
