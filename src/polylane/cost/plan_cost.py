"""A scene: one plan on one cluster, and what each of its stages takes and holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost.closed_form import ShardTrafficSeconds, exposed_seconds
from polylane.cost.cost_table import Clock, CostTable, ShardedGraphCost
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.memory.optimizer_state import OptimizerState
from polylane.cost.memory.peak import (
    MemoryBreakdown,
    MemoryMargin,
    ShardedLoad,
    TrainedBytes,
    peak_memory,
    shard_trained_bytes,
)
from polylane.cost.memory.peak import recompute_blocks as recomputed_need
from polylane.cost.network import collectives as network
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.stage_cost import PassCosts, Range, StageCosts, WeightBytes, add_recomputation, sum_passes
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees
from polylane.program.lower import BUCKET_BYTES
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes, schedule_lanes


@dataclass(frozen=True)
class CostModel:
    """What predictions rest on.

    Attributes:
        cluster: the devices and what links them.
        stages: prices of the graph.
        method: how training is done.
        make_clock: how long operators take on a device.
        update_seconds: seconds that the optimizer takes for so many trained elements in so many tensors on a device.
        optimizer: what it keeps for each parameter.
        margin: memory that is lost beyond the tensors.
        host_overhead: seconds of the host from one pass of a microbatch to the next, beyond its operators.
    """

    cluster: Cluster
    stages: StageCosts
    method: TrainingOptions
    make_clock: Callable[[Device], Clock]
    update_seconds: Callable[[Device, int, int], float]
    optimizer: OptimizerState
    margin: MemoryMargin
    host_overhead: float = 0.0


@dataclass(frozen=True)
class ShardTraffic:
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
        update_seconds: seconds of the optimizer.
        memory: that it needs at most.
        shard_traffic: of parameters, on top of the passes.
    """

    mesh: Degrees
    samples: int
    passes: PassCosts
    weights: WeightBytes
    update_seconds: float
    memory: MemoryBreakdown
    shard_traffic: ShardTraffic = ShardTraffic()

    @property
    def collective_seconds(self) -> float:
        """Seconds that both passes of a microbatch wait for collectives."""
        return (
            self.passes.waits
            + self.passes.backward_waits
            + self.shard_traffic.waits
            + self.shard_traffic.backward_waits
        )

    @property
    def shard_traffic_share(self) -> float:
        """Of the bytes that its passes send, the share that replicas gather and scatter: from 0 to 1."""
        own = self.shard_traffic.sent + self.shard_traffic.backward_sent
        return own / (own + self.passes.sent) if own else 0.0


class PlanCost:
    """Prices of the stages of one plan on one cluster; arguments as of :func:`polylane.cost.predict.predict`."""

    def __init__(self, basis: CostModel, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        self.exact = exact
        self.basis, self.partition, self.plan, self.batch = basis, partition, plan, batch
        self._priced: dict[int, StagePrediction] = {}
        self._tables: dict[int, CostTable] = {}

    @cached_property
    def stage_graph(self) -> StageGraph:
        """Which stages wait for which."""
        return StageGraph.of_partition(self.partition)

    def local_samples(self, stage: int) -> int:
        """That a replica of a stage has in hand for each microbatch, at most."""
        return -(-self.batch // (self.plan.microbatches * self.plan.degree("data", stage)))

    def node_ranges(self, stage: int) -> list[Range]:
        return [(first, end) for first, end, owner in self.partition.pieces if owner == stage]

    def table(self, stage: int) -> CostTable:
        """What every node takes on a stage's mesh, with all that is computed again."""
        if stage not in self._tables:
            stages, recompute = self.basis.stages, self.basis.method.recompute
            plain = self._table(stage)
            self._tables[stage] = (
                plain if recompute == "none" else add_recomputation(plain, stages.recompute_counts(recompute))
            )
        return self._tables[stage]

    def _table(self, stage: int) -> CostTable:
        mesh, rank = self.plan.degrees(stage), self.plan.stages[stage].devices[0]
        axes = ("data", *self.plan.axes_of(stage)) if mesh.data > 1 else self.plan.axes_of(stage)
        groups = {axis: self.plan.ranks_along(rank, axis) for axis in axes}
        device = self.slowest_device(stage)
        exchange = {axis: network.make_collective_clock(self.basis.cluster, ranks) for axis, ranks in groups.items()}
        where = (device.kind, device.speed, tuple((a, self.basis.cluster.span(r)) for a, r in groups.items()))
        rates = network.fit_rank_speed(self.basis.cluster, self.plan.stages[stage].devices[:2], self.basis.method.dtype)
        return self.basis.stages.table(
            mesh, self.local_samples(stage), where, self.basis.make_clock(device), exchange, rates
        )

    def slowest_device(self, stage: int) -> Device:
        """The slowest of a stage's devices: all others wait for it."""
        found = self.basis.cluster.devices(self.plan.stages[stage].devices)
        return min(found, key=lambda device: device.speed * max(device.achieved.values()))

    def partial_gradient_axes(self, stage: int) -> Mapping[str, tuple[str, ...]]:
        """Parameters whose gradients are summands along axes of a stage's mesh."""
        return self.basis.stages.partial_gradient_axes(self.plan.degrees(stage))

    def predict_stage(self, stage: int) -> StagePrediction:
        """What a stage's busiest rank does."""
        if stage not in self._priced:
            table, pieces, mesh = self.table(stage), self.node_ranges(stage), self.plan.degrees(stage)
            own = sum_passes(table, pieces)
            weights = self.basis.stages.weights(mesh, pieces)
            trained = self.basis.method.count_updated(weights.trained_elements, mesh.data)
            update = self.basis.update_seconds(self.slowest_device(stage), trained, weights.trained_tensors)
            memory, sharing = self.peak_memory(stage), self._shard_traffic(stage, own)
            self._priced[stage] = StagePrediction(
                mesh, self.local_samples(stage), own, weights, update, memory, sharing
            )
        return self._priced[stage]

    def _shard_traffic(self, stage: int, own: PassCosts) -> ShardTraffic:
        """Each block's parameters are gathered for either pass, and its gradients scattered behind the second one."""
        if not self.basis.method.gathers_parameters(self.plan.degree("data", stage)):
            return ShardTraffic()
        ranks = self.plan.ranks_along(self.plan.stages[stage].devices[0], "data")
        blocks = [self.parameter_bytes(stage, names) for names in self._block_parameters(stage) if names]
        traffic, turn = ShardTrafficSeconds.of(self.basis.cluster, blocks, ranks, gathers=1), self.basis.host_overhead
        gathered = bytes_per_rank("all_gather", sum(blocks), len(ranks))
        scattered = bytes_per_rank("reduce_scatter", sum(blocks), len(ranks))
        return ShardTraffic(
            exposed_seconds(own.forward + own.waits + turn, traffic.gathers),
            exposed_seconds(own.backward + own.backward_waits + turn, traffic.seconds),
            gathered,
            gathered + scattered,
        )

    def parameter_bytes(self, stage: int, names: Iterable[str]) -> float:
        """Of parameters, or of their gradients, as a rank of a stage computes with them."""
        sheet = self.sharded_graph(stage)
        return sum(sheet.busiest_bytes((f"parameter:{name}", 0), sheet.view.samples) for name in names)

    def peak_memory(self, stage: int) -> MemoryBreakdown:
        """What a stage's busiest rank holds at most."""
        basis, load = self.basis, self.trained_bytes(stage)
        needs, trained = {stage: self.microbatch_memory(stage)}, {stage: load.trained}
        return peak_memory(
            self._lanes[stage], needs, trained, load, basis.method, self.plan.degree("data", stage), basis.margin
        )

    @cached_property
    def _lanes(self) -> Lanes:
        """The passes of every stage, in order."""
        return schedule_lanes(self.plan.schedule, self.stage_graph, self.plan.microbatches)

    def sharded_load(self, stage: int) -> ShardedLoad:
        """What a rank of a stage trains, as far as it holds it."""
        return shard_trained_bytes(self.trained_bytes(stage), self.basis.method, self.plan.degree("data", stage))

    def microbatch_memory(self, stage: int) -> PeakMemory:
        """What one microbatch needs of a stage's busiest rank."""
        basis, mesh, pieces = self.basis, self.plan.degrees(stage), self.node_ranges(stage)

        def held(ranges: Sequence[Range]) -> PeakMemory:
            again = basis.method.recompute == "selective"
            return basis.stages.microbatch_memory(mesh, self.local_samples(stage), ranges, self.exact, again)

        need = held(pieces)
        if basis.method.recompute == "full":
            need = recomputed_need(need, [held([each]) for each in self._block_bounds(stage)])
        return need

    def _block_bounds(self, stage: int) -> list[Range]:
        """Where the blocks of a stage, or what it has of them, begin and end."""
        every, found = self.basis.stages.block_positions, list[Range]()
        for first, end in self.node_ranges(stage):
            found += itertools.pairwise([first, *(p for p in every if first < p < end), end])
        return found

    def _block_parameters(self, stage: int) -> list[list[str]]:
        """The trained parameters of every block of a stage, each in the first one that reads it."""
        graph, seen, found = self.partition.graph, set[str](), list[list[str]]()
        for first, end in self._block_bounds(stage):
            read = dict.fromkeys(name for node in graph.nodes[first:end] for name in node.parameters)
            found.append([name for name in read if name not in seen and graph.parameters[name].trainable])
            seen.update(read)
        return found

    def trained_bytes(self, stage: int) -> TrainedBytes:
        """What a rank of a stage trains, in bytes."""
        graph, sheet = self.partition.graph, self.sharded_graph(stage)
        names = [name for name in self.partition.parameters(stage) if graph.parameters[name].trainable]
        shapes = {name: sheet.busiest_shape(f"parameter:{name}") for name in names}
        item = {name: graph.parameters[name].bytes // max(1, math.prod(graph.parameters[name].shape)) for name in names}
        sizes = {name: math.prod(shapes[name]) * item[name] for name in names}
        frozen = [n for n in self.partition.parameters(stage) if n not in sizes]
        fixed = sum(graph.parameters[n].bytes for n in frozen)
        fixed += sum(graph.buffers[n].bytes for n in self.partition.buffers(stage))
        fixed += sum(constant.nbytes for constant in graph.code.constants.values())
        trained = sum(sizes.values())
        shared = self.plan.degree("data", stage) > 1
        copied = sum(size for size in sizes.values() if size <= BUCKET_BYTES) if shared else 0
        block = max((sum(sizes[name] for name in each) for each in self._block_parameters(stage)), default=0)
        return TrainedBytes(
            fixed + trained,
            trained,
            sum(self.basis.optimizer.bytes(name, shapes[name]) for name in names),
            self.basis.optimizer.step_bytes(list(sizes.values())),
            copied,
            block,
        )

    def sharded_graph(self, stage: int) -> ShardedGraphCost:
        """The graph as it lies on a stage's mesh."""
        return self.basis.stages.sharded_graph(self.plan.degrees(stage))
