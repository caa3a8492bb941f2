"""A scene: one plan on one cluster, and what each of its stages takes and holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost import network
from polylane.cost.closed import Traffic, lost
from polylane.cost.communicate import sent
from polylane.cost.memory import Load, Margin, Memory, ShardedLoad, memory, sharded
from polylane.cost.memory import recomputed as recomputed_need
from polylane.cost.method import Method
from polylane.cost.optimizer_state import OptimizerState
from polylane.cost.residence import Need
from polylane.cost.stage import Passes, Range, Stages, Weights, passes, recomputed
from polylane.cost.table import Clock, Sheet, Table
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees
from polylane.program.lower import BUCKET_BYTES
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes, schedule_lanes


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
class Sharing:
    """What replicas that hold parts of the parameters gather and scatter beside the passes of one microbatch.

    Attributes:
        waits, backward_waits: seconds that the passes take longer by.
        sent, backward_sent: bytes.
    """

    waits: float = 0.0
    backward_waits: float = 0.0
    sent: float = 0.0
    backward_sent: float = 0.0


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
        sharing: of parameters, on top of the passes.
    """

    mesh: Degrees
    samples: int
    passes: Passes
    weights: Weights
    update: float
    memory: Memory
    sharing: Sharing = Sharing()

    @property
    def waits(self) -> float:
        """Seconds that both passes of a microbatch wait for collectives."""
        return self.passes.waits + self.passes.backward_waits + self.sharing.waits + self.sharing.backward_waits

    @property
    def shared(self) -> float:
        """Of the bytes that its passes send, the share that replicas gather and scatter: from 0 to 1."""
        own = self.sharing.sent + self.sharing.backward_sent
        return own / (own + self.passes.sent) if own else 0.0


class Scene:
    """Prices of the stages of one plan on one cluster; arguments as of :func:`polylane.cost.predict.predict`."""

    def __init__(self, basis: Basis, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        self.exact = exact
        self.basis, self.partition, self.plan, self.batch = basis, partition, plan, batch
        self._priced: dict[int, StagePrediction] = {}
        self._tables: dict[int, Table] = {}

    @cached_property
    def order(self) -> StageGraph:
        """Which stages wait for which."""
        return StageGraph.of_partition(self.partition)

    def samples(self, stage: int) -> int:
        """That a replica of a stage has in hand for each microbatch, at most."""
        return -(-self.batch // (self.plan.microbatches * self.plan.degree("data", stage)))

    def pieces(self, stage: int) -> list[Range]:
        return [(first, end) for first, end, owner in self.partition.pieces if owner == stage]

    def table(self, stage: int) -> Table:
        """What every node takes on a stage's mesh, with all that is computed again."""
        if stage not in self._tables:
            stages, recompute = self.basis.stages, self.basis.method.recompute
            plain = self._table(stage)
            self._tables[stage] = plain if recompute == "none" else recomputed(plain, stages.repeated(recompute))
        return self._tables[stage]

    def _table(self, stage: int) -> Table:
        mesh, rank = self.plan.degrees(stage), self.plan.stages[stage].devices[0]
        axes = ("data", *self.plan.axes_of(stage)) if mesh.data > 1 else self.plan.axes_of(stage)
        groups = {axis: self.plan.along(rank, axis) for axis in axes}
        device = self.device(stage)
        exchange = {axis: network.exchange(self.basis.cluster, ranks) for axis, ranks in groups.items()}
        where = (device.kind, device.speed, tuple((a, self.basis.cluster.span(r)) for a, r in groups.items()))
        rates = network.rates(self.basis.cluster, self.plan.stages[stage].devices[:2], self.basis.method.dtype)
        return self.basis.stages.table(mesh, self.samples(stage), where, self.basis.clock(device), exchange, rates)

    def device(self, stage: int) -> Device:
        """The slowest of a stage's devices: all others wait for it."""
        found = self.basis.cluster.devices(self.plan.stages[stage].devices)
        return min(found, key=lambda device: device.speed * max(device.achieved.values()))

    def partial(self, stage: int) -> Mapping[str, tuple[str, ...]]:
        """Parameters whose gradients are summands along axes of a stage's mesh."""
        return self.basis.stages.summed(self.plan.degrees(stage))

    def stage(self, stage: int) -> StagePrediction:
        """What a stage's busiest rank does."""
        if stage not in self._priced:
            table, pieces, mesh = self.table(stage), self.pieces(stage), self.plan.degrees(stage)
            own = passes(table, pieces)
            weights = self.basis.stages.weights(mesh, pieces)
            trained = self.basis.method.updated(weights.trained, mesh.data)
            update = self.basis.update(self.device(stage), trained, weights.tensors)
            memory, sharing = self.memory(stage), self._sharing(stage, own)
            self._priced[stage] = StagePrediction(mesh, self.samples(stage), own, weights, update, memory, sharing)
        return self._priced[stage]

    def _sharing(self, stage: int, own: Passes) -> Sharing:
        """Each block's parameters are gathered for either pass, and its gradients scattered behind the second one."""
        if not self.basis.method.gathers(self.plan.degree("data", stage)):
            return Sharing()
        ranks = self.plan.along(self.plan.stages[stage].devices[0], "data")
        blocks = [self.bytes(stage, names) for names in self._blocks(stage) if names]
        traffic, turn = Traffic.of(self.basis.cluster, blocks, ranks, gathers=1), self.basis.overhead
        gathered = sent("all_gather", sum(blocks), len(ranks))
        scattered = sent("reduce_scatter", sum(blocks), len(ranks))
        return Sharing(
            lost(own.forward + own.waits + turn, traffic.gathers),
            lost(own.backward + own.backward_waits + turn, traffic.seconds),
            gathered,
            gathered + scattered,
        )

    def bytes(self, stage: int, names: Iterable[str]) -> float:
        """Of parameters, or of their gradients, as a rank of a stage computes with them."""
        sheet = self.sheet(stage)
        return sum(sheet.bytes((f"parameter:{name}", 0), sheet.view.samples) for name in names)

    def memory(self, stage: int) -> Memory:
        """What a stage's busiest rank holds at most."""
        basis, load = self.basis, self.load(stage)
        needs, trained = {stage: self.need(stage)}, {stage: load.trained}
        return memory(
            self._lanes[stage], needs, trained, load, basis.method, self.plan.degree("data", stage), basis.margin
        )

    @cached_property
    def _lanes(self) -> Lanes:
        """The passes of every stage, in order."""
        return schedule_lanes(self.plan.schedule, self.order, self.plan.microbatches)

    def sharded_load(self, stage: int) -> ShardedLoad:
        """What a rank of a stage trains, as far as it holds it."""
        return sharded(self.load(stage), self.basis.method, self.plan.degree("data", stage))

    def need(self, stage: int) -> Need:
        """What one microbatch needs of a stage's busiest rank."""
        basis, mesh, pieces = self.basis, self.plan.degrees(stage), self.pieces(stage)

        def held(ranges: Sequence[Range]) -> Need:
            again = basis.method.recompute == "selective"
            return basis.stages.need(mesh, self.samples(stage), ranges, self.exact, again)

        need = held(pieces)
        if basis.method.recompute == "full":
            need = recomputed_need(need, [held([each]) for each in self._bounds(stage)])
        return need

    def _bounds(self, stage: int) -> list[Range]:
        """Where the blocks of a stage, or what it has of them, begin and end."""
        every, found = self.basis.stages.blocks, list[Range]()
        for first, end in self.pieces(stage):
            found += itertools.pairwise([first, *(p for p in every if first < p < end), end])
        return found

    def _blocks(self, stage: int) -> list[list[str]]:
        """The trained parameters of every block of a stage, each in the first one that reads it."""
        graph, seen, found = self.partition.graph, set[str](), list[list[str]]()
        for first, end in self._bounds(stage):
            read = dict.fromkeys(name for node in graph.nodes[first:end] for name in node.parameters)
            found.append([name for name in read if name not in seen and graph.parameters[name].trainable])
            seen.update(read)
        return found

    def load(self, stage: int) -> Load:
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
        block = max((sum(sizes[name] for name in each) for each in self._blocks(stage)), default=0)
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
