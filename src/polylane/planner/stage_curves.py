"""Stage curves: time and memory of every possible stage, as running sums over cut positions, to rate many plans.

The figures are those of `polylane.cost`, but a pipeline's time comes from a formula instead of the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polylane.cluster.cluster import Cluster, ranks_along
from polylane.cluster.rank_span import Ranks
from polylane.cost.cost_table import CostTable
from polylane.cost.memory.peak import MemoryMargin, TrainedBytes, shard_trained_bytes
from polylane.cost.network import collectives as network
from polylane.cost.network.compressed_reduction import price_compressed
from polylane.cost.network.sync_volume import TrainedTensor
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel
from polylane.cost.shard_traffic import EXPOSED
from polylane.cost.stage_cost import add_recomputation
from polylane.cost.state_sharding import StateSharding
from polylane.graph.cut_points import MOST, narrow_positions
from polylane.graph.partition import cut_positions
from polylane.plan.recompute import NONE
from polylane.plan.spec import Degrees
from polylane.plan.sync import SUM, SyncOptions
from polylane.planner.balance import Array, BalancedCuts
from polylane.schedule.estimates import StageSeconds

Places = NDArray[np.int64]
# Collectives that overlap with the passes where parameters are sharded over replicas (ZeRO-3).
BESIDE = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class StageCurves:
    """Running sums over the possible cut positions of a graph, for one mesh and one number of local samples.

    Attributes:
        forward, backward: seconds of a pass, collectives included.
        weight: of ``backward``, seconds of the half that makes gradients of weights.
        halving: seconds by which both halves of a backward pass take longer than the whole.
        trace_activations: returns ``activation_bytes``, which are traced only where a plan is rated by them.
        elements: trained elements of a rank, counted at the first use of each parameter.
        frozen_bytes: bytes of a rank's parameters that are not trained, counted likewise.
        cut_bytes: bytes that a rank receives if the graph is cut at each position, in one direction (no running sum).
        gather_seconds, scatter_seconds: seconds of overlapped collectives, lower bounds of a pass: parameter gathers of
            each pass, gradient scatters of the backward pass. Their exposed part is in the passes already.
        host_overhead: seconds of the host per pass of a stage.
    """

    forward: Array
    backward: Array
    weight: Array
    halving: Array
    trace_activations: Callable[[], Array]
    elements: Array
    frozen_bytes: Array
    cut_bytes: Array
    gather_seconds: Array
    scatter_seconds: Array
    host_overhead: float

    @cached_property
    def activation_bytes(self) -> Array:
        """Bytes that a microbatch holds between its passes."""
        return self.trace_activations()

    @cached_property
    def balanced_cuts(self) -> BalancedCuts:
        """The best cuts into any number of stages, whatever memory they take."""
        return BalancedCuts(self.pass_seconds)

    @property
    def pass_seconds(self) -> Array:
        """Running sum of both passes' seconds, without host overhead and the bound of overlapped collectives."""
        return self.forward + self.backward

    def stage_seconds(self, start: Places, end: Places) -> StageSeconds:
        """Return the seconds of a microbatch on the stages between positions, host overhead included."""
        return self._pass_seconds(lambda curve: np.asarray(curve[end] - curve[start]))

    def balanced_seconds(self, stages: int) -> StageSeconds:
        """Return the seconds of a microbatch on so many stages that share the graph evenly."""
        return self._pass_seconds(lambda curve: np.full(stages, (curve[-1] - curve[0]) / stages))

    def _pass_seconds(self, part: Callable[[Array], Array]) -> StageSeconds:
        """Return the seconds of stages, of which ``part`` returns the part of each in a running sum."""
        forward, backward = part(self.forward) + self.host_overhead, part(self.backward) + self.host_overhead
        gathers = part(self.gather_seconds)
        return StageSeconds(
            np.maximum(forward, gathers),
            np.maximum(backward, gathers + part(self.scatter_seconds)),
            part(self.weight),
            part(self.halving),
            overhead=self.host_overhead,
        )


@dataclass(frozen=True)
class Footprint:
    """Memory bound of a worker, from its trained elements and saved activations.

    Attributes:
        state_bytes: bytes of optimizer states for each trained element.
        itemsize: bytes per parameter element in the model.
        margin: memory that a worker takes beyond its tensors.
        method: precision of the training.
        sync: how replicas synchronize, and what they share out.
    """

    state_bytes: float
    itemsize: int
    margin: MemoryMargin
    method: TrainingOptions
    sync: SyncOptions = SUM

    def __call__(self, elements: Array, activation_bytes: Array, data: int) -> Array:
        """Return the bytes of workers, one for each stage of the arrays.

        Args:
            elements: trained elements of one rank.
            activation_bytes: activation bytes of all microbatches in flight.
            data: number of replicas of the stage.
        """
        tensors = elements * self.bytes_per_element(data) + activation_bytes
        return tensors * (1 + self.margin.share) + self.margin.fixed_bytes

    def available_bytes(self, limit: float) -> float:
        """Return the bytes that parameters, gradients, states and activations may take on a worker with this memory."""
        return (limit - self.margin.fixed_bytes) / (1 + self.margin.share)

    def bytes_per_element(self, data: int) -> float:
        """Return the bytes of parameters, gradients and optimizer states per trained element of a rank."""
        load = TrainedBytes(self.itemsize, self.itemsize, self.state_bytes)
        trained_bytes = shard_trained_bytes(load, self.method, StateSharding.of(self.sync, data))
        return trained_bytes.parameters + trained_bytes.gradients + trained_bytes.states


class CurveCache:
    """Cache of the curves of one graph on one cluster.

    Args:
        basis: cost model of the graph on the cluster.
        batch: samples of a step over all replicas.
        staying: names of values that must not cross between stages.
        sync: how replicas synchronize, and what they share out.

    Attributes:
        positions: positions at which the graph may be cut, both ends included.
        cuts_cache: balanced cuts of pipelines, by everything that they depend on.
    """

    def __init__(self, basis: CostModel, batch: int, staying: Sequence[str] = (), sync: SyncOptions = SUM) -> None:
        self.basis, self.batch, self.staying, self.sync = basis, batch, staying, sync
        graph = basis.stages.graph
        # Large graphs are cut only at narrow positions, where few bytes cross: the searches are quadratic in
        # the positions.
        allowed = cut_positions(graph, staying)
        inner = tuple(allowed) if len(allowed) <= MOST else narrow_positions(graph, staying)
        self.positions = np.array([0, *inner, len(graph.nodes)])
        self._curves: dict[object, StageCurves] = {}
        self._counts_cache: dict[object, Array] = {}
        self.cuts_cache: dict[object, BalancedCuts] = {}

    @property
    def max_stages(self) -> int:
        """Most stages into which the graph can be cut."""
        return len(self.positions) - 1

    def on_cluster(self, cluster: Cluster) -> CurveCache:
        """Return the curves of the same training on other devices or links."""
        basis = replace(self.basis, cluster=cluster, stages=self.basis.stages.without_prices())
        return CurveCache(basis, self.batch, self.staying, self.sync)

    def with_sync(self, sync: SyncOptions) -> CurveCache:
        """Return the curves of the same training with another synchronization of its replicas.

        Everything that does not depend on it is shared: tables, activations, and all curves but those of parameters
        that are gathered or gradients that are scattered inside the passes.
        """
        clone = CurveCache.__new__(CurveCache)
        clone.basis, clone.batch, clone.staying, clone.sync = self.basis, self.batch, self.staying, sync
        clone.positions, clone._counts_cache, clone._curves = self.positions, self._counts_cache, self._curves
        clone.cuts_cache = self.cuts_cache
        return clone

    def sharding(self, data: int, microbatches: int = 1) -> StateSharding:
        """Return what so many replicas share out in a step of so many microbatches."""
        return StateSharding.of(self.sync, data, microbatches)

    @cached_property
    def footprint(self) -> Footprint:
        """Memory bound of a worker, with the mean state bytes and item size of the trained parameters."""
        basis = self.basis
        trained = [(name, info) for name, info in basis.stages.graph.parameters.items() if info.trainable]
        elements = sum(math.prod(info.shape) for _, info in trained) or 1
        state_bytes = sum(basis.optimizer.bytes(name, info.shape) for name, info in trained) / elements
        item = sum(info.bytes for _, info in trained) // elements or 4
        return Footprint(state_bytes, item, basis.margin, basis.method, self.sync)

    def table(self, mesh: Degrees, samples: int) -> CostTable:
        """Return the cost of every node on the slowest device of the cluster."""
        basis, replicas = self.basis.for_workers(mesh.workers), self._statistics_replicas(mesh)
        cluster, crowded = basis.cluster, basis.cluster is not self.basis.cluster
        degrees = {"data": mesh.data, "sequence": mesh.sequence, "tensor": mesh.tensor}
        axes = [axis for axis in ("sequence", "tensor") if degrees[axis] > 1] + ["data"] * (replicas > 1)
        groups = {axis: ranks_along(degrees, axis) for axis in axes}
        device, memory = basis.slowest_device(range(cluster.count)), cluster.device(0).stream
        return basis.table(mesh, samples, device, memory, groups, ("estimate", replicas, crowded))

    def _statistics_replicas(self, mesh: Degrees) -> int:
        """Return how many replicas sum batch statistics inside their passes; 1 for graphs without."""
        shared = self.basis.stages.graph.code.has_batch_statistics and not self.sync.is_replica_local
        return mesh.data if shared else 1

    def curves(self, mesh: Degrees, samples: int, replicas: Ranks, microbatches: int = 1) -> StageCurves:
        """Return the curves of a rank.

        Args:
            mesh: degrees of the stage's mesh.
            samples: local samples of a microbatch.
            replicas: the ranks of its data group.
            microbatches: number of microbatches of a step.
        """
        # The key leaves out what does not change the curves: the data degree, unless gradients or parameters are
        # exchanged in the passes or statistics are shared.
        sharding = self.sharding(len(replicas), microbatches)
        parts = sharding.in_passes
        group = sharding.group(replicas)
        exchange = (self.basis.cluster.span(group), sharding.gathers_parameters) if parts else None
        crowded = self.basis.cluster.for_workers(mesh.workers) is not self.basis.cluster
        key = (mesh.sequence, mesh.tensor, samples, self._statistics_replicas(mesh), crowded, exchange)
        if key not in self._curves:
            # Zeros broadcast to any length where nothing is gathered.
            collective_seconds = (
                [
                    self._block_collective_seconds(mesh, kind, group)
                    if sharding.gathers_parameters or kind != "all_gather"
                    else np.zeros(1)
                    for kind in BESIDE
                ]
                if parts
                else [np.zeros(1)] * 2
            )
            self._curves[key] = self._build_curves(mesh, samples, *collective_seconds)
        return self._curves[key]

    def _build_curves(self, mesh: Degrees, samples: int, gathers: Array, scatters: Array) -> StageCurves:
        stages, recompute, at = self.basis.stages, self.basis.method.recompute, self.positions
        table = add_recomputation(self.table(mesh, samples), stages.recompute_counts(recompute))
        forward = table.forward + table.waits + EXPOSED * gathers
        backward = table.backward + table.backward_waits + EXPOSED * (gathers + scatters)

        def trace_activations() -> Array:
            if recompute == "full":
                held_bytes = stages.block_input_bytes(mesh)
            else:
                held_bytes = self._activation_bytes(mesh, recompute == "selective", len(gathers) > 1)
            activation_bytes: Array = (held_bytes * samples)[at]
            return activation_bytes

        return StageCurves(
            forward[at],
            backward[at],
            table.backward_weight[at],
            table.halving[at],
            trace_activations,
            self._elements(mesh)[at],
            self._frozen_bytes(mesh)[at],
            stages.cut_bytes(mesh)[at] * samples,
            np.broadcast_to(gathers, forward.shape)[at],
            np.broadcast_to(scatters, forward.shape)[at],
            self.basis.host_overhead,
        )

    def _block_collective_seconds(self, mesh: Degrees, kind: str, replicas: Ranks) -> Array:
        """Return running sums over the nodes of each block's collective, spread over its parameters' first uses.

        A cut through a block then gives each part its share.
        """
        sizes, bounds = self._first_use_bytes(mesh, kind), np.array(self.basis.stages.block_positions)
        blocks = np.add.reduceat(sizes, bounds[:-1])
        seconds = {
            size: network.collective_seconds(self.basis.cluster, kind, size, replicas, None) for size in set(blocks)
        }
        rates = np.array([seconds[size] / size if size else 0.0 for size in blocks])
        return np.concatenate([[0.0], np.cumsum(sizes * np.repeat(rates, np.diff(bounds)))])

    def _first_use_bytes(self, mesh: Degrees, kind: str) -> Array:
        """Return for every node the local bytes of the trained parameters that it is the first to use.

        As they are gathered (``kind`` is "all_gather"), or their gradients scattered.
        """
        key = (mesh.sequence, mesh.tensor, kind)
        if key not in self._counts_cache:
            sheet, graph = self.basis.stages.sharded_graph(mesh), self.basis.stages.graph
            sizes = np.zeros(len(graph.nodes))
            for name, position in self.basis.stages.first_uses.items():
                if graph.parameters[name].trainable:
                    sizes[position] += (
                        self.basis.stages.gathered_bytes(mesh, name)
                        if kind == "all_gather"
                        else sheet.busiest_bytes((f"parameter:{name}", 0), sheet.view.samples)
                    )
            self._counts_cache[key] = sizes
        return self._counts_cache[key]

    def gathered_bytes(self, mesh: Degrees) -> float:
        """Return the bytes of whole parameters and gradients that a rank has for a time, of those that it shards."""
        sharding = self.sharding(mesh.data)
        if sharding.kind not in ("gradients", "parameters"):
            return 0.0
        bounds = np.array(self.basis.stages.block_positions)[:-1]
        # Gradients of the block that was computed last; parameters of this block and of the next one.
        counts = {"reduce_scatter": 1, "all_gather": 2 if sharding.gathers_parameters else 0}
        blocks = {kind: self._first_use_bytes(mesh, kind) for kind, count in counts.items() if count}
        return sum(counts[kind] * float(np.add.reduceat(sizes, bounds).max()) for kind, sizes in blocks.items())

    def closing_seconds(self, elements: float, replicas: Ranks, microbatches: int = 1) -> tuple[float, float]:
        """Return the seconds of the gradient and of the parameter collective over replicas, for trained elements.

        Where replicas synchronize otherwise, it is in the second figure, which no pass hides.
        """
        size, cluster = elements * min(4, self.basis.method.float_itemsize), self.basis.cluster
        if len(replicas) > 1 and not self.sync.is_summed_or_sharded:
            return 0.0, self._other_sync_seconds(elements, replicas)
        sharding = self.sharding(len(replicas), microbatches)
        group = sharding.group(replicas)
        summed = network.collective_seconds(cluster, sharding.gradient_collective, size, group, None)
        return summed, network.collective_seconds(cluster, sharding.parameter_collective, size, group, None)

    def _other_sync_seconds(self, elements: float, replicas: Ranks) -> float:
        """Return the seconds of averages, compressed reductions or servers, as an estimate: all elements as one."""
        cluster, item, sync = self.basis.cluster, self.footprint.itemsize, self.sync
        ranks, size = tuple(replicas), elements * item
        if sync.has_servers:
            # Each server's link takes in and gives out its share once for every replica.
            share = size * len(ranks) / sync.server_count
            return 2 * network.message_seconds(cluster, share, ranks[0], ranks[-1])
        if sync.every > 1:
            return network.collective_seconds(cluster, "all_reduce", size, ranks, None) / sync.every
        side = max(1, math.isqrt(int(elements)))
        tensors = [TrainedTensor((side, max(1, int(elements) // side)), item, len(ranks))]
        reduction = price_compressed(sync, tensors, ranks, cluster, cluster.device(0))
        return reduction.seconds + reduction.packing + reduction.unpacking

    def _activation_bytes(self, mesh: Degrees, is_selective: bool, gathers: bool) -> Array:
        """Return the activation bytes per sample of the nodes before each cut position."""
        key = (mesh.sequence, mesh.tensor, "held", is_selective, gathers)
        if key not in self._counts_cache:
            base = self.basis.stages.graph.samples
            dropped = self.basis.stages.drop_everywhere(mesh, base, "selective" if is_selective else NONE)
            stages = self.basis.stages.gathering_cast if gathers else self.basis.stages
            residence = stages.live_ranges(mesh, base, dropped)
            live_bytes = np.zeros(len(self.basis.stages.graph.nodes) + 1)
            for position in self.positions[1:]:
                # Exact for the stage from 0 to the position; the differences approximate other
                # stages. Live bytes may shrink at a cut, but running sums must not.
                live_bytes[position] = residence.microbatch_memory([(0, int(position))]).live_bytes / base
            self._counts_cache[key] = np.maximum.accumulate(live_bytes)
        return self._counts_cache[key]

    def _elements(self, mesh: Degrees) -> Array:
        key = (mesh.sequence, mesh.tensor)
        if key not in self._counts_cache:
            sheet, counts = self.basis.stages.sharded_graph(mesh), np.zeros(len(self.basis.stages.graph.nodes) + 1)
            for name, position in self.basis.stages.first_uses.items():
                if not self.basis.stages.graph.parameters[name].trainable:
                    continue
                tensor = (f"parameter:{name}", 0)
                counts[position + 1] += sheet.busiest_bytes(tensor, sheet.view.samples) / sheet.itemsize(tensor)
            self._counts_cache[key] = np.cumsum(counts)
        return self._counts_cache[key]

    def _frozen_bytes(self, mesh: Degrees) -> Array:
        key = (mesh.sequence, mesh.tensor, "frozen")
        if key not in self._counts_cache:
            graph, sheet = self.basis.stages.graph, self.basis.stages.sharded_graph(mesh)
            sizes = np.zeros(len(graph.nodes) + 1)
            for name, position in self.basis.stages.first_uses.items():
                if not graph.parameters[name].trainable:
                    sizes[position + 1] += sheet.busiest_bytes((f"parameter:{name}", 0), sheet.view.samples)
            self._counts_cache[key] = np.cumsum(sizes)
        return self._counts_cache[key]
