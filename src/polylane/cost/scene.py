"""A scene: one plan on one cluster, and what each of its stages takes and holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost import network
from polylane.cost.memory import Load, Margin, Memory, memory
from polylane.cost.memory import recomputed as recomputed_need
from polylane.cost.method import Method
from polylane.cost.optimizer_state import OptimizerState
from polylane.cost.residence import Need
from polylane.cost.stage import Passes, Stages, Weights, passes, recomputed
from polylane.cost.table import Clock, Exchange, Sheet, Table
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees
from polylane.program.lower import BUCKET_BYTES
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import live_bound


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


class Scene:
    """Prices of the stages of one plan on one cluster; arguments as of :func:`polylane.cost.predict.predict`."""

    def __init__(self, basis: Basis, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        self.exact = exact
        self.basis, self.partition, self.plan, self.batch = basis, partition, plan, batch
        self._priced: dict[int, StagePrediction] = {}
        self._tables: dict[int, Table] = {}
        self.order = StageGraph.of_partition(partition)

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
        graph, sheet = self.partition.graph, self.sheet(stage)
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

    def sheet(self, stage: int) -> Sheet:
        """The graph as it lies on a stage's mesh."""
        return self.basis.stages.sheet(self.plan.degrees(stage))
