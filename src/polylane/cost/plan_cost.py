"""Plan cost: seconds, bytes and peak memory of every stage of one plan on one cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TypeVar

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cluster.rank_span import Ranks
from polylane.cost.cost_table import Clock, CostTable, ShardedGraphCost
from polylane.cost.memory import peak
from polylane.cost.memory.held_messages import find_held_messages
from polylane.cost.memory.intervals import Range
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.memory.optimizer_state import OptimizerState
from polylane.cost.memory.recompute_budget import drop_on_stage
from polylane.cost.memory.recompute_choice import union_of
from polylane.cost.network import collectives as network
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.shard_traffic import ShardTraffic, ShardTrafficSeconds, exposed_seconds
from polylane.cost.stage_cost import PassCosts, StageCosts, add_recomputation, sum_passes
from polylane.cost.state_sharding import StateSharding
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.partition import Partition
from polylane.graph.sparse_gradients import gradient_sizes
from polylane.plan.lanes import stage_graph_of
from polylane.plan.local_samples import find_busiest, local_samples
from polylane.plan.plan import Plan
from polylane.plan.recompute import NONE
from polylane.plan.spec import Degrees
from polylane.program.group_programs import lower_groups
from polylane.program.lower import BUCKET_BYTES
from polylane.program.program import Program
from polylane.program.server_assignment import server_rank
from polylane.samples.running_norms import find_running_norms
from polylane.schedule.action import PASSES
from polylane.schedule.asynchronous import weight_delays


@dataclass(frozen=True)
class CostModel:
    """Everything but the plan that a prediction depends on.

    Attributes:
        cluster: the devices and the links between them.
        stages: prices of the graph's stages, cached by mesh and samples.
        method: precision, recomputation and overlap of the training.
        make_clock: device -> clock that prices operators on it.
        update_seconds: (device, trained elements) -> seconds of the optimizer's step.
        optimizer: tensors that the optimizer keeps for each parameter.
        margin: memory that a worker takes beyond its tensors.
        host_overhead: seconds of the host from one microbatch pass to the next, beyond issuing operators.
    """

    cluster: Cluster
    stages: StageCosts
    method: TrainingOptions
    make_clock: Callable[[Device], Clock]
    update_seconds: Callable[[Device, int], float]
    optimizer: OptimizerState
    margin: peak.MemoryMargin
    host_overhead: float = 0.0

    def for_workers(self, workers: int) -> CostModel:
        """Return the cost model of plans with so many workers, whose hosts may be crowded."""
        return replace(self, cluster=self.cluster.for_workers(workers))

    def slowest_device(self, ranks: Ranks) -> Device:
        """Return the slowest device of a group: all others wait for it in collectives."""
        return min(self.cluster.devices(ranks), key=lambda device: device.speed * max(device.achieved.values()))

    def table(
        self, mesh: Degrees, samples: int, device: Device, memory: float, groups: Mapping[str, Ranks], clock_key: object
    ) -> CostTable:
        """Return the cost of every node on a rank of a mesh.

        Args:
            mesh, samples: degrees of the mesh, and local samples for each microbatch.
            device: the device that the rank computes on.
            memory: bytes per second of the rank's own memory, for redistributions that only copy locally.
            groups: by axis, ranks of one group; has "data" if replicas sum the statistics of batch normalization.
            clock_key: cache key of the device and the groups.
        """
        exchange = {axis: network.make_collective_clock(self.cluster, group) for axis, group in groups.items()}
        return self.stages.table(mesh, samples, clock_key, self.make_clock(device), exchange, memory)


@dataclass(frozen=True)
class StagePrediction:
    """Predicted cost of the busiest rank of a group of workers, over all of its stages.

    Attributes:
        mesh: degrees of the stage's data, sequence and tensor axes.
        samples: local samples of a replica for each microbatch.
        passes: seconds and bytes of one microbatch.
        update_seconds: seconds of the optimizer's step on the rank.
        memory: bytes at the peak of the step.
        shard_traffic: gathered parameters and scattered gradients, on top of the passes.
    """

    mesh: Degrees
    samples: int
    passes: PassCosts
    update_seconds: float
    memory: peak.MemoryBreakdown
    shard_traffic: ShardTraffic = field(default_factory=ShardTraffic)

    @property
    def collective_seconds(self) -> float:
        """Seconds that the two passes of a microbatch wait for collectives."""
        return (
            self.passes.waits
            + self.passes.backward_waits
            + self.shard_traffic.waits
            + self.shard_traffic.backward_waits
        )

    @property
    def shard_traffic_share(self) -> float:
        """Fraction (0 to 1) of the bytes sent in the passes that is parameter sharding's traffic."""
        shard_bytes = self.shard_traffic.sent + self.shard_traffic.backward_sent
        return shard_bytes / (shard_bytes + self.passes.sent) if shard_bytes else 0.0


class PlanCost:
    """Costs of the stages of one plan on one cluster; for the arguments see :func:`polylane.cost.predict.predict`."""

    def __init__(self, basis: CostModel, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        self.basis, self.partition, self.plan = basis.for_workers(plan.workers), partition, plan
        self.batch, self.exact = batch, exact
        self._priced: dict[int, StagePrediction] = {}
        self._passes: dict[int, tuple[PassCosts, ShardTraffic]] = {}
        self._tables: dict[int, CostTable] = {}

    def local_samples(self, stage: int) -> int:
        """Return the most samples that a replica of a stage has in one microbatch."""
        return local_samples(self.plan, stage, self.batch)

    def node_ranges(self, stage: int) -> list[Range]:
        return [(start, end) for start, end, owner in self.partition.pieces if owner == stage]

    def table(self, stage: int) -> CostTable:
        """Return the cost of every node on a stage's mesh, recomputation included."""
        if stage not in self._tables:
            stages, recompute, table = self.basis.stages, self.basis.method.recompute, self._table(stage)
            # What the plan says is what the runtime runs again; the option is for whole blocks, as others run them.
            if recompute != NONE and self.plan.recompute_of(stage) == NONE:
                table = add_recomputation(table, stages.recompute_counts(recompute))
            elif self.dropped_tensors:
                table = add_recomputation(table, stages.repeat_counts(self.dropped_tensors))
            self._tables[stage] = table
        return self._tables[stage]

    @cached_property
    def dropped_tensors(self) -> DroppedTensors:
        """What the plan drops in forward passes, to be recomputed in the backward passes."""
        return union_of(self._drop(stage) for stage in range(self.plan.pipeline))

    def _drop(self, stage: int) -> DroppedTensors:
        mode = self.plan.recompute_of(stage)
        if mode == NONE and self.basis.method.recompute == "selective":
            mode = "selective"
        if mode == NONE and not self.partition.graph.checkpoints:
            return NOTHING_DROPPED
        samples = self.local_samples(stage) if self.exact else self.partition.graph.samples
        values = self.basis.stages.saved_values(self.plan.degrees(stage), samples)
        return drop_on_stage(values, self.partition, stage, mode)

    def _table(self, stage: int) -> CostTable:
        mesh, rank = self.plan.degrees(stage), self.plan.stages[stage].devices[0]
        # "data" is priced too: batch normalization sums its statistics over replicas inside the passes, unless each
        # replica takes steps of its own, from its own samples, or has whole microbatches.
        shared = mesh.data > 1 and not (self.plan.sync.is_replica_local or self.plan.takes_turns)
        groups = {axis: self.plan.ranks_along(rank, axis) for axis in ("data",) * shared + self.plan.axes_of(stage)}
        # Stages with equal devices and equally spanned groups share one table.
        cluster, slowest = self.basis.cluster, self.basis.slowest_device
        ranks, samples = find_busiest(self.plan, stage, self.batch, lambda ranks: slowest(ranks).speed)
        device = slowest(ranks)
        clock_key = (device.kind, device.speed, tuple((axis, cluster.span(group)) for axis, group in groups.items()))
        memory = min(rank_device.stream for rank_device in cluster.devices(ranks[:2]))
        return self.basis.table(mesh, samples, device, memory, groups, clock_key)

    def pass_costs(self, stage: int) -> tuple[PassCosts, ShardTraffic]:
        """Return the costs of one microbatch on one stage's busiest rank, and of its sharded parameters."""
        if stage not in self._passes:
            costs = sum_passes(self.table(stage), self.node_ranges(stage))
            self._passes[stage] = costs, self._shard_traffic(stage, costs)
        return self._passes[stage]

    def predict_stage(self, stage: int) -> StagePrediction:
        """Predict the busiest rank of the workers of a stage, over all stages that they have."""
        stage, chunks = self.plan.first_chunk(stage), self.plan.chunks(stage)
        if stage not in self._priced:
            mesh, costs = self.plan.degrees(stage), [self.pass_costs(chunk) for chunk in chunks]
            pieces = [piece for chunk in chunks for piece in self.node_ranges(chunk)]
            elements = self.basis.stages.trained_elements(mesh, pieces)
            device = self.basis.slowest_device(self.plan.stages[stage].devices)
            # Servers update the weights, in their own time.
            updated = self.sharding(stage).count_updated(elements)
            update = 0.0 if self.plan.sync.has_servers else self.basis.update_seconds(device, updated)
            passes, sharing = _add_fields(cost for cost, _ in costs), _add_fields(cost for _, cost in costs)
            memory = self.peak_memory(stage)
            self._priced[stage] = StagePrediction(mesh, self.local_samples(stage), passes, update, memory, sharing)
        return self._priced[stage]

    def _shard_traffic(self, stage: int, costs: PassCosts) -> ShardTraffic:
        """Price ZeRO-3 in a pass: a block's parameters are gathered before it, its gradients scattered after backward.

        ZeRO-2 scatters them as well where there are several microbatches, and gathers nothing here.
        """
        sharding = self.sharding(stage)
        if not sharding.in_passes:
            return ShardTraffic()
        ranks = sharding.group(self.plan.ranks_along(self.plan.stages[stage].devices[0], "data"))
        blocks = [self.parameter_bytes(stage, names) for names in self._block_parameters(stage) if names]
        # One gather per pass: gathers=1 prices the forward pass, and with the reduce-scatter the backward
        # pass.
        gathers, turn = int(sharding.gathers_parameters), self.basis.host_overhead
        gathered_blocks = [self._gathered_bytes(stage, names) for names in self._block_parameters(stage) if names]
        gathered_blocks *= gathers
        traffic = ShardTrafficSeconds.of(self.basis.cluster, blocks, gathered_blocks, ranks)
        gathered = bytes_per_rank("all_gather", sum(gathered_blocks), len(ranks))
        scattered = bytes_per_rank("reduce_scatter", sum(blocks), len(ranks))
        return ShardTraffic(
            exposed_seconds(costs.forward + costs.waits + turn, traffic.gathers),
            exposed_seconds(costs.backward + costs.backward_waits + turn, traffic.seconds),
            gathered,
            gathered + scattered,
        )

    def parameter_bytes(self, stage: int, names: Iterable[str]) -> float:
        """Return the local bytes of parameters, or of their gradients, in the dtype of the passes."""
        sheet = self.sharded_graph(stage)
        return sum(sheet.busiest_bytes((f"parameter:{name}", 0), sheet.view.samples) for name in names)

    def _gathered_bytes(self, stage: int, names: Iterable[str]) -> float:
        """Return the local bytes of parameters as they are gathered for a pass (ZeRO-3)."""
        return sum(self.basis.stages.gathered_bytes(self.plan.degrees(stage), name) for name in names)

    def peak_memory(self, stage: int) -> peak.MemoryBreakdown:
        """Return the bytes of a stage's busiest rank at the peak of the step, with all stages that it has."""
        return self._peaks[self.plan.first_chunk(stage)]

    @cached_property
    def _peaks(self) -> dict[int, peak.MemoryBreakdown]:
        """Peak memory of every group of workers, by its first stage."""
        # The passes and messages of every group of workers, in the order of the schedule.
        programs = lower_groups(self.partition, self.plan)
        return {stage: self._group_peak(stage, p) for stage, p in zip(self.plan.first_chunks, programs, strict=True)}

    def _group_peak(self, stage: int, program: Program) -> peak.MemoryBreakdown:
        chunks = self.plan.chunks(stage)
        basis, load = self.basis, self.trained_bytes(*chunks)
        needs = {chunk: self.microbatch_memory(chunk) for chunk in chunks}
        trained = {chunk: self.trained_bytes(chunk).trained for chunk in chunks}
        lane, messages = [a for a in program.actions if a.kind in PASSES], find_held_messages(program, needs)
        return peak.peak_memory(lane, needs, trained, load, basis.method, self.sharding(stage), basis.margin, messages)

    def sharded_load(self, stage: int) -> peak.ShardedLoad:
        """Return a rank's parameters, gradients and states in bytes, sharded over replicas as the options say."""
        load = self.trained_bytes(*self.plan.chunks(stage))
        return peak.shard_trained_bytes(load, self.basis.method, self.sharding(stage))

    def kept_statistics_bytes(self, stage: int) -> int:
        """Return the bytes of the statistics by which replicas in turn move running ones; 0 where there are none.

        A mean and a variance of every normalization, in float64, for each microbatch.
        """
        plan, graph = self.plan, self.partition.graph
        if not plan.takes_turns or plan.degree("data", stage) == 1:
            return 0
        names = {node.name for chunk in plan.chunks(stage) for node in self.partition.nodes(chunk)}
        norms, _ = find_running_norms(graph.code.fx, names)
        channels = sum(math.prod(graph.buffers[name].shape) for norm in norms for name in (norm.mean, norm.variance))
        return 8 * plan.microbatches * channels

    def sharding(self, stage: int) -> StateSharding:
        """Return what the replicas of a stage share out, as the plan says."""
        return StateSharding.of(self.plan.sync, self.plan.degree("data", stage), self.plan.microbatches)

    def microbatch_memory(self, stage: int) -> PeakMemory:
        """Return the memory that one microbatch takes on a stage's busiest rank."""
        basis, mesh, pieces = self.basis, self.plan.degrees(stage), self.node_ranges(stage)

        def held(ranges: Sequence[Range]) -> PeakMemory:
            samples, dropped = self.local_samples(stage), self.dropped_tensors
            stages = basis.stages.gathering_cast if self.sharding(stage).gathers_parameters else basis.stages
            return stages.microbatch_memory(mesh, samples, ranges, self.exact, dropped)

        need = held(pieces)
        # Full recomputation prices every block as a stage of its own, then combines them.
        if basis.method.recompute == "full" and self.plan.recompute_of(stage) == NONE:
            need = peak.recompute_blocks(need, [held([block]) for block in self._block_bounds(stage)])
        return need

    def _block_bounds(self, stage: int) -> list[Range]:
        """Return the ranges of a stage's blocks; a block that a cut divides counts with the part in this stage."""
        positions, blocks = self.basis.stages.block_positions, list[Range]()
        for start, end in self.node_ranges(stage):
            blocks += itertools.pairwise([start, *(p for p in positions if start < p < end), end])
        return blocks

    def _block_parameters(self, stage: int) -> list[list[str]]:
        """Return the trained parameters of every block of a stage; shared ones with the first block that reads them."""
        graph, seen_names, blocks = self.partition.graph, set[str](), list[list[str]]()
        for start, end in self._block_bounds(stage):
            read = dict.fromkeys(name for node in graph.nodes[start:end] for name in node.parameters)
            blocks.append([name for name in read if name not in seen_names and graph.parameters[name].trainable])
            seen_names.update(read)
        return blocks

    def trained_bytes(self, *stages: int) -> peak.TrainedBytes:
        """Return the bytes of a rank's parameters, gradients and optimizer state, before sharding over replicas.

        Args:
            stages: stages of the same workers, which have a parameter of several of them once.
        """
        graph, sheet = self.partition.graph, self.sharded_graph(stages[0])
        union = dict.fromkeys(name for stage in stages for name in self.partition.parameters(stage))
        names = [name for name in union if graph.parameters[name].trainable]
        shapes = {name: sheet.busiest_shape(f"parameter:{name}") for name in names}
        item = {name: graph.parameters[name].bytes // max(1, math.prod(graph.parameters[name].shape)) for name in names}
        sizes = {name: math.prod(shapes[name]) * item[name] for name in names}  # in the model's own dtype
        # Frozen ones and buffers are split by operator axes like others, but never shared out over replicas.
        fixed = sum(sheet.busiest_bytes_of("parameter", n, graph.parameters[n].bytes) for n in union if n not in sizes)
        for n in {n for s in stages for n in self.partition.buffers(s)}:
            fixed += sheet.busiest_bytes_of("buffer", n, graph.buffers[n].bytes)
        fixed += sum(constant.nbytes for constant in graph.code.constants.values())
        trained = sum(sizes.values())
        replicas = self.plan.degree("data", stages[0])
        sparse = gradient_sizes(graph, self.batch / replicas, sizes)
        # Tensors larger than a bucket are reduced in place; smaller ones are copied into a flat buffer.
        copied = sum(size for n, size in sizes.items() if size <= BUCKET_BYTES and n not in sparse and replicas > 1)
        block = max((sum(sizes[n] for n in group) for s in stages for group in self._block_parameters(s)), default=0)
        state_bytes = sum(self.basis.optimizer.bytes(n, shapes[n]) for n in names)
        return peak.TrainedBytes(
            fixed + trained * (1 + self._stashed_versions(stages[0])),
            trained,
            self._synchronized_states(stages[0], trained, state_bytes),
            self.basis.optimizer.step_bytes(list(sizes.values())),
            copied,
            block,
            sum(sizes[name] - size for name, size in sparse.items()),
        )

    def _stashed_versions(self, stage: int) -> int:
        """Return how many versions of the trained weights a stage keeps beside the newest: for batches under way."""
        plan = self.plan
        if not plan.is_asynchronous:
            return 0
        graph = stage_graph_of(self.partition, self.plan)
        return weight_delays(plan.schedule, graph, plan.most_turns, plan.vertical_sync)[stage]

    def _synchronized_states(self, stage: int, trained: float, state_bytes: float) -> float:
        """Return the bytes of states of a rank, with what synchronization keeps: residuals, anchors, servers' weights.

        Args:
            stage: index of the stage that the rank computes.
            trained: bytes of its trained parameters.
            state_bytes: bytes of its optimizer's states.
        """
        sync = self.plan.sync
        if sync.has_servers:
            hosts = [] if sync.dedicated else [server_rank(self.plan, s) for s in range(sync.server_count)]
            servers = max((hosts.count(rank) for rank in self.plan.stages[stage].devices), default=0)
            # A server has weights, optimizer states, a sum of gradients and a message of them.
            return servers / sync.server_count * (3 * self._model_bytes[0] + self._model_bytes[1]) if servers else 0.0
        if sync.compress is not None:
            return state_bytes + trained  # error feedback keeps what was not sent
        if sync.outer is not None:
            return state_bytes + (2 if sync.outer.momentum else 1) * trained  # the anchor and its momentum
        return state_bytes

    @cached_property
    def _model_bytes(self) -> tuple[float, float]:
        """Bytes of all trained parameters of the model, and of their optimizer's states."""
        parameters = [(n, info) for n, info in self.partition.graph.parameters.items() if info.trainable]
        return (
            float(sum(info.bytes for _, info in parameters)),
            float(sum(self.basis.optimizer.bytes(name, info.shape) for name, info in parameters)),
        )

    def sharded_graph(self, stage: int) -> ShardedGraphCost:
        """Return the graph sharded over a stage's mesh."""
        return self.basis.stages.sharded_graph(self.plan.degrees(stage))


_Costs = TypeVar("_Costs", PassCosts, ShardTraffic)


def _add_fields(costs: Iterable[_Costs]) -> _Costs:
    """Return the costs whose every field is the sum of those of all given."""
    head, *tail = costs
    return replace(head, **{f.name: sum(getattr(c, f.name) for c in (head, *tail)) for f in fields(head)})
