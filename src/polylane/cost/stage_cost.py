"""Stage cost: seconds of one rank's passes, bytes that it holds and sends, for any range of nodes as a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from polylane.cost.cost_table import Array, Clock, CollectiveClock, CostTable, ShardedGraphCost
from polylane.cost.memory.attention_cores import find_attention_cores
from polylane.cost.memory.intervals import Range
from polylane.cost.memory.live_ranges import LiveRanges, PeakMemory
from polylane.cost.memory.recompute_choice import SavedValues, drop_by_mode
from polylane.cost.memory.saved_by_operators import saved_on_rank, trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.cost.weight_halves import HALVING_TRAVERSALS
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.cut_points import block_positions, crossing_bytes
from polylane.graph.graph import Graph
from polylane.graph.operators.autocast_reads import find_weight_reads
from polylane.placement.operator_view import OperatorView
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import OperatorCall
from polylane.plan.recompute import NONE, Mode
from polylane.plan.spec import Degrees


class MeshSplit(Protocol):
    """The sharding of a graph's operators over the axes of a mesh."""

    splits: dict[str, AxisSplit]

    @property
    def view(self) -> OperatorView:
        """The graph's operator view at the samples for which the splits were chosen."""
        ...

    def partial_gradient_axes(self) -> Mapping[str, tuple[str, ...]]:
        """Return the parameters whose gradients are partial sums on the ranks of an axis, with these axes."""
        ...

    def at(self, samples: int) -> tuple[Mapping[str, OperatorCall], Mapping[str, AxisSplit]]:
        """Return every operator as a call, and the splits by axis, at ``samples`` local samples."""
        ...


Lay = Callable[..., MeshSplit]
MOST_PLACED = 4  # Costs of other placements that are kept at a time: their traces take memory.


@dataclass(frozen=True)
class PassCosts:
    """Cost of one microbatch on one rank of a stage.

    Attributes:
        forward, backward: seconds of computation.
        waits, backward_waits: seconds of collectives inside the passes, on top of the computation.
        sent: bytes sent in these collectives, forward and backward.
        stalled: the part of the computation's seconds in which the device waits for the host to issue operators.
        backward_weight: the part of ``backward`` that computes gradients of weights, where it is in two halves.
        halving: seconds by which both halves take longer than ``backward``; the second one takes them.
    """

    forward: float
    backward: float
    waits: float
    backward_waits: float
    sent: float
    stalled: float = 0.0
    backward_weight: float = 0.0
    halving: float = 0.0

    @property
    def second_half(self) -> float:
        """Seconds of the second half of a backward pass in two."""
        return self.backward_weight + self.halving

    @property
    def backward_input(self) -> float:
        """Seconds of the first half of a backward pass in two: all but the gradients of weights."""
        # Sums over the graph's nodes: of a stage that is all weights the difference may round below zero.
        return max(0.0, self.backward - self.backward_weight)


class StageCosts:
    """Prices stages of one graph; every table is built once.

    Args:
        graph: the captured graph, before any sharding.
        lay: mesh degrees, and what else is known of its stages -> sharding of the graph's operators.
        float_itemsize: bytes per floating-point element at most, where passes run in a lower precision than the graph.
        setting: device, dtype and kernels that decide which tensors autograd saves.
    """

    def __init__(self, graph: Graph, lay: Lay, float_itemsize: int | None, setting: BackendSetting) -> None:
        self.graph, self._lay, self._float_itemsize, self.setting = graph, lay, float_itemsize, setting
        # Caches. Keys begin with the degrees (sequence, tensor): the data degree changes only the local
        # samples.
        self._keepings: dict[tuple[object, ...], SavedTensors] = {}
        self._values: dict[tuple[object, ...], SavedValues] = {}
        self._residences: dict[tuple[object, ...], LiveRanges] = {}
        self._graphs: dict[tuple[int, int], tuple[MeshSplit | None, ShardedGraphCost]] = {}
        self._tables: dict[tuple[object, ...], CostTable] = {}
        self._live: dict[tuple[int, int], Array] = {}
        self._needs: dict[tuple[object, ...], PeakMemory] = {}
        self._placed: dict[object, StageCosts] = {}  # with other placements, the latest ones

    def without_prices(self) -> StageCosts:
        """Return a copy that shares layouts and memory traces, but no prices: for other devices or links."""
        costs = StageCosts(self.graph, self._lay, self._float_itemsize, self.setting)
        costs._graphs, costs._keepings, costs._residences = self._graphs, self._keepings, self._residences
        costs._values = self._values
        return costs

    @cached_property
    def gathering_cast(self) -> StageCosts:
        """The costs of stages whose weights ZeRO-3 gathers: in autocast's dtype, so that no cast of them is saved."""
        if self.setting.autocast is None or self.setting.gathers_cast:
            return self
        costs = StageCosts(self.graph, self._lay, self._float_itemsize, replace(self.setting, gathers_cast=True))
        costs._graphs = self._graphs
        return costs

    def with_placements(self, **placements: Collection[str] | int) -> StageCosts:
        """Return the costs of other placements; the arguments are those of ``lay`` besides the mesh."""
        key = frozenset((name, v if isinstance(v, int) else frozenset(v)) for name, v in placements.items())
        if key not in self._placed:
            # The plans that are priced with them, as often as they are changed, follow each other.
            for old_key in list(self._placed)[: 1 - MOST_PLACED]:
                del self._placed[old_key]
            lay = partial(self._lay, **placements)
            self._placed[key] = StageCosts(self.graph, lay, self._float_itemsize, self.setting)
        return self._placed[key]

    def sharded_graph(self, mesh: Degrees) -> ShardedGraphCost:
        """Return the graph sharded over the sequence and tensor axes of a mesh."""
        return self._sharded(mesh)[1]

    def gathered_bytes(self, mesh: Degrees, name: str) -> float:
        """Return the bytes of a parameter on the busiest rank as ZeRO-3 gathers it.

        That is in the dtype of the passes, but for what autocast leaves alone: it is gathered in its own.
        """
        sheet, cast = self.sharded_graph(mesh), self.setting.autocast
        if cast is None or name in find_weight_reads(self.graph, cast).cast:
            return sheet.busiest_bytes((f"parameter:{name}", 0), sheet.view.samples)
        return sheet.busiest_bytes_of("parameter", name, self.graph.parameters[name].bytes)

    def _sharded(self, mesh: Degrees) -> tuple[MeshSplit | None, ShardedGraphCost]:
        """Return the sharding of the operators, None without operator axes, and the graph sharded by it."""
        key = (mesh.sequence, mesh.tensor)
        if key not in self._graphs:
            laid = None if key == (1, 1) else self._lay(mesh)
            splits, view = ({}, None) if laid is None else (laid.splits, laid.view)
            sheet = ShardedGraphCost(self.graph, splits, self.graph.samples, self._float_itemsize, view)
            self._graphs[key] = laid, sheet
        return self._graphs[key]

    def table(
        self,
        mesh: Degrees,
        samples: int,
        clock_key: object,
        clock: Clock,
        exchange: Mapping[str, CollectiveClock],
        memory: float,
    ) -> CostTable:
        """Return the cost of every node; ``clock_key`` is the cache key of ``clock`` and ``exchange``."""
        key = (mesh.sequence, mesh.tensor, samples, clock_key)
        if key not in self._tables:
            sheet = self.sharded_graph(mesh)
            table = limit_by_host(sheet.table(samples, clock, exchange, memory), self.block_positions)
            self._tables[key] = add_halving(table, sheet, HALVING_TRAVERSALS.get(self.setting.device, 0.0) / memory)
        return self._tables[key]

    def microbatch_memory(
        self,
        mesh: Degrees,
        samples: int,
        pieces: Sequence[Range],
        exact: bool,
        dropped: DroppedTensors = NOTHING_DROPPED,
    ) -> PeakMemory:
        """Return the memory that one microbatch takes on a stage's rank.

        Args:
            mesh, samples, pieces: the stage's degrees, local samples and ranges of nodes.
            exact: whether to trace at these samples; else scaled from the samples of the capture.
            dropped: what forward passes drop, to be recomputed in the backward pass.
        """
        traced_samples = samples if exact else self.graph.samples
        key = (mesh.sequence, mesh.tensor, self._sums_statistics(mesh, dropped), traced_samples, dropped, *pieces)
        if key not in self._needs:
            self._needs[key] = self.live_ranges(mesh, traced_samples, dropped).microbatch_memory(pieces)
        return self._needs[key].scaled(samples / traced_samples)

    def live_ranges(self, mesh: Degrees, samples: int, dropped: DroppedTensors = NOTHING_DROPPED) -> LiveRanges:
        """Return the live ranges of a rank's memory; arguments as of :meth:`microbatch_memory`."""
        synced = self._sums_statistics(mesh, dropped)
        key = (mesh.sequence, mesh.tensor, samples, synced, dropped)
        if key not in self._residences:
            keeping = self._saved_tensors(mesh, samples, synced)
            repeated_pieces = self.saved_values(mesh, samples).pieces(dropped) if dropped else ()
            self._residences[key] = LiveRanges(self.graph, keeping, dropped, repeated_pieces)
        return self._residences[key]

    def saved_values(self, mesh: Degrees, samples: int) -> SavedValues:
        """Return what a rank's operators make and save, to choose from it what is dropped."""
        synced = mesh.data > 1 and self.graph.code.has_batch_statistics
        key = (mesh.sequence, mesh.tensor, samples, synced)
        if key not in self._values:
            self._values[key] = SavedValues(self.graph, self._saved_tensors(mesh, samples, synced))
        return self._values[key]

    def drop_everywhere(self, mesh: Degrees, samples: int, mode: str) -> DroppedTensors:
        """Return what is dropped of the whole graph, as if it were one stage: "none", "selective" or "full"."""
        if mode == NONE and not self.graph.checkpoints:
            return NOTHING_DROPPED
        values = self.saved_values(mesh, samples)
        return values.on_stage(drop_by_mode(values, mode), set(self.graph.positions), ())

    def _sums_statistics(self, mesh: Degrees, dropped: DroppedTensors) -> bool:
        """Return whether it matters that batch normalization, which sums statistics over replicas, runs only once."""
        return bool(dropped) and mesh.data > 1 and self.graph.code.has_batch_statistics

    def _saved_tensors(self, mesh: Degrees, samples: int, synced: bool = False) -> SavedTensors:
        key = (mesh.sequence, mesh.tensor, samples, synced)
        if key not in self._keepings:
            setting = replace(self.setting, samples=samples, sync_batch_norm=synced or self.setting.sync_batch_norm)
            laid, _ = self._sharded(mesh)
            if laid is None:
                self._keepings[key] = trace_saved_tensors(self.graph, setting)
            else:
                calls, splits = laid.at(samples)
                self._keepings[key] = saved_on_rank(self.graph, setting, calls, splits, aliases=laid.view.aliases)
        return self._keepings[key]

    @cached_property
    def attention_cores(self) -> tuple[frozenset[str], ...]:
        """Names of the nodes of every attention."""
        return find_attention_cores(self.graph)

    def recompute_counts(self, recompute: Mode) -> Array:
        """Return for every node how often it is recomputed in the backward pass: 0 or 1."""
        counts = np.full(len(self.graph.nodes), 1.0 if recompute == "full" else 0.0)
        if recompute == "selective":
            counts[[self.graph.positions[name] for core in self.attention_cores for name in core]] = 1.0
        return counts

    def repeat_counts(self, dropped: DroppedTensors) -> Array:
        """Return for every node how often the backward pass runs it again: 0 or 1."""
        counts = np.zeros(len(self.graph.nodes))
        counts[[self.graph.positions[name] for name in dropped.again]] = 1.0
        return counts

    @cached_property
    def first_uses(self) -> Mapping[str, int]:
        """Position of the first node that reads each parameter."""
        positions: dict[str, int] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in node.parameters:
                positions.setdefault(name, position)
        return positions

    def trained_elements(self, mesh: Degrees, pieces: Sequence[Range]) -> int:
        """Return the number of elements of the trained parameters' local shards on a rank of a stage."""
        names = {name for start, end in pieces for i in range(start, end) for name in self.graph.nodes[i].parameters}
        sheet = self.sharded_graph(mesh)
        keys = [(f"parameter:{name}", 0) for name in names if self.graph.parameters[name].trainable]
        return sum(int(sheet.busiest_bytes(key, sheet.view.samples) // sheet.itemsize(key)) for key in keys)

    def partial_gradient_axes(self, mesh: Degrees) -> Mapping[str, tuple[str, ...]]:
        """Return the parameters whose gradients are partial sums on the ranks of an axis, with these axes."""
        laid, _ = self._sharded(mesh)
        return {} if laid is None else laid.partial_gradient_axes()

    @cached_property
    def block_positions(self) -> tuple[int, ...]:
        """Boundaries of the blocks that are recomputed or gathered as one, both ends included."""
        return block_positions(self.graph)

    def block_input_bytes(self, mesh: Degrees) -> Array:
        """Return running sums over the nodes: bytes per sample that enter blocks beginning before each position."""
        live, begins = self.cut_bytes(mesh), np.zeros(len(self.graph.nodes) + 1)
        for position in self.block_positions[:-1]:
            begins[position + 1] = live[position]
        return np.cumsum(begins)

    def cut_bytes(self, mesh: Degrees) -> Array:
        """Return for every position the local bytes per sample of the values that cross a cut there."""
        key = (mesh.sequence, mesh.tensor)
        if key not in self._live:
            sheet = self.sharded_graph(mesh)
            samples = sheet.view.samples
            self._live[key] = (
                crossing_bytes(self.graph, lambda name: sheet.busiest_value_bytes(name, samples)) / samples
            )
        return self._live[key]


def limit_by_host(table: CostTable, bounds: Sequence[int]) -> CostTable:
    """Return a table in which the device waits for the host where issuing a block takes longer than computing it.

    The host issues the operators of a block while the device computes and waits for collectives; it does not run ahead
    of the device by more than a block, as was measured on steps of many models.

    Args:
        table: the device's own seconds, with the host's in the ``issued`` arrays.
        bounds: positions at which blocks begin and end, both ends of the graph included.
    """
    at = np.asarray(bounds)
    block = np.searchsorted(at, np.arange(len(table.forward) - 1), side="right") - 1  # of every node
    gaps = []
    for compute, waits, issued in (("forward", "waits", "issued"), ("backward", "backward_waits", "backward_issued")):
        # Per block: the gap is the host's time beyond the device's; it is spread over the block's nodes in
        # proportion to what the host takes for each, so that a cut inside a block stays additive.
        host = np.diff(getattr(table, issued)[at])
        gap = np.maximum(host - np.diff(getattr(table, compute)[at] + getattr(table, waits)[at]), 0.0)
        stalls = np.diff(getattr(table, issued)) * (gap / np.where(host > 0, host, 1.0))[block]
        gaps.append(np.concatenate([[0.0], np.cumsum(stalls)]))
    forward, backward = gaps
    # A node's gradients of weights wait for the host in proportion to their part of its backward pass.
    plain = np.diff(table.backward)
    slower = 1.0 + np.diff(backward) / np.where(plain > 0, plain, math.inf)
    return replace(
        table,
        forward=table.forward + forward,
        backward=table.backward + backward,
        stalled=forward,
        backward_stalled=backward,
        backward_weight=np.concatenate([[0.0], np.cumsum(np.diff(table.backward_weight) * slower)]),
    )


def add_halving(table: CostTable, sheet: ShardedGraphCost, seconds_per_byte: float) -> CostTable:
    """Return a table with what two halves of a backward pass take longer than the whole.

    Args:
        table: costs of every node.
        sheet: the sharded graph whose nodes these are.
        seconds_per_byte: that each byte takes which a second half reads.
    """
    read_bytes = sheet.weight_halves.kept_bytes(lambda key: sheet.busiest_bytes(key, table.samples))
    return replace(table, halving=np.concatenate([[0.0], np.cumsum(read_bytes * seconds_per_byte)]))


def sum_passes(table: CostTable, pieces: Sequence[Range]) -> PassCosts:
    """Return the costs of a stage made up of these ranges of nodes."""
    names = ("forward", "backward", "waits", "backward_waits", "sent", "stalled", "backward_stalled")
    forward, backward, waits, backward_waits, sent, forward_stall, back, weight, halving = (
        sum(table.between(name, start, end) for start, end in pieces) for name in (*names, "backward_weight", "halving")
    )
    return PassCosts(forward, backward, waits, backward_waits, sent, forward_stall + back, weight, halving)


def add_recomputation(table: CostTable, repeated: Array) -> CostTable:
    """Return a table in which some nodes run forward again in the backward pass, their collectives included.

    Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", 2022.

    Args:
        table: costs of every node without recomputation.
        repeated: how often each node is recomputed (:meth:`StageCosts.recompute_counts`).
    """

    def more(array: Array) -> Array:
        return np.concatenate([[0.0], np.cumsum(repeated * np.diff(array))])

    return replace(
        table,
        backward=table.backward + more(table.forward),
        backward_waits=table.backward_waits + more(table.waits),
        sent=table.sent + more(table.sent) / 2,  # ``sent`` counts both passes; only the forward half is repeated
        backward_issued=table.backward_issued + more(table.issued),
        backward_stalled=table.backward_stalled + more(table.stalled),
    )
