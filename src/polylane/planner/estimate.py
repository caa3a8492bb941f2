"""Estimates: what stages of a graph take, for every start and end at once, so that thousands of plans can be compared.

Figures are those of `polylane.cost`, without the play of the schedule: a pipeline's time is its formula's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cluster.cluster import along
from polylane.cluster.span import Ranks
from polylane.cost import network
from polylane.cost.closed import EXPOSED
from polylane.cost.method import Method
from polylane.cost.predict import Basis
from polylane.cost.stage import recomputed
from polylane.cost.table import Table
from polylane.graph.narrow import MOST, narrow_positions
from polylane.graph.partition import cut_positions
from polylane.plan.spec import Degrees
from polylane.planner.cuts import Array, Cuts

Places = NDArray[np.int64]
# Collectives beside the passes, where replicas hold parts of the parameters.
BESIDE = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Curves:
    """Running sums over the positions where a graph may be cut, of one mesh and one number of samples.

    Attributes:
        forward, backward: seconds of a pass, waiting included.
        held: bytes kept of a microbatch.
        elements: of the parameters that a rank holds and trains, counted where they are first used.
        entering: bytes that a cut at each position makes travel to a rank, one way.
        gathers, scatters: seconds of collectives beside a pass, which takes no less: gathering parameters for either
            pass, scattering gradients in the backward pass. Their exposed share is part of the passes.
        turn: seconds of the host for every pass of a stage.
    """

    forward: Array
    backward: Array
    held: Array
    elements: Array
    entering: Array
    gathers: Array
    scatters: Array
    turn: float

    @property
    def passes(self) -> Array:
        """Seconds of both passes without turns, where nothing beside them takes longer."""
        return self.forward + self.backward

    def stages(self, first: Places, end: Places) -> tuple[Array, Array]:
        """Seconds of the forward and of the backward pass of stages between such positions, turns included."""

        def own(curve: Array) -> Array:
            return np.asarray(curve[end] - curve[first])

        forward, backward = own(self.forward) + self.turn, own(self.backward) + self.turn
        gathers = own(self.gathers)
        return np.maximum(forward, gathers), np.maximum(backward, gathers + own(self.scatters))


class Estimates:
    """Curves of one graph on one cluster, each made once.

    Args:
        basis: what predictions rest on.
        batch: samples of a step.
        staying: values that must not cross between stages.

    Attributes:
        positions: at which the graph may be cut, both ends included.
        cuts: of pipelines that were looked at, by what they depend on.
    """

    def __init__(self, basis: Basis, batch: int, staying: Sequence[str] = ()) -> None:
        self.basis, self.batch = basis, batch
        graph = basis.stages.graph
        allowed = cut_positions(graph, staying)
        inner = tuple(allowed) if len(allowed) <= MOST else narrow_positions(graph, staying)
        self.positions = np.array([0, *inner, len(graph.nodes)])
        self._curves: dict[object, Curves] = {}
        self._counted: dict[object, Array] = {}
        self.cuts: dict[object, Cuts] = {}

    @property
    def pieces(self) -> int:
        """Into how many stages the graph can be cut."""
        return len(self.positions) - 1

    def table(self, mesh: Degrees, samples: int) -> Table:
        """What every node takes on the slowest device."""
        basis = self.basis
        device = min(
            basis.cluster.devices(range(basis.cluster.count)), key=lambda d: d.speed * max(d.achieved.values())
        )
        axes = [axis for axis in ("sequence", "tensor") if getattr(mesh, axis) > 1]
        axes += ["data"] if self._synchronized(mesh) > 1 else []
        degrees = {"data": mesh.data, "sequence": mesh.sequence, "tensor": mesh.tensor}
        exchange = {axis: network.exchange(basis.cluster, along(degrees, axis)) for axis in axes}
        rates = network.rates(basis.cluster, range(1), basis.method.dtype)
        return basis.stages.table(
            mesh, samples, ("estimate", self._synchronized(mesh)), basis.clock(device), exchange, rates
        )

    def _synchronized(self, mesh: Degrees) -> int:
        """How many replicas sum the statistics of a batch in the course of their passes."""
        return mesh.data if self.basis.stages.graph.code.batch_statistics else 1

    def curves(self, mesh: Degrees, samples: int, method: Method, replicas: Ranks = (0,)) -> Curves:
        """Of a rank with so many samples in hand; ``replicas``: the ranks of a stage that hold the same."""
        parts = method.gathers(len(replicas))
        where = self.basis.cluster.span(replicas) if parts else None
        key = (mesh.sequence, mesh.tensor, samples, method.recompute, self._synchronized(mesh), where)
        if key not in self._curves:
            beside = [self._beside(mesh, kind, replicas) for kind in BESIDE] if parts else [np.zeros(1)] * 2
            self._curves[key] = self._made(mesh, samples, method, *beside)
        return self._curves[key]

    def _made(self, mesh: Degrees, samples: int, method: Method, gathers: Array, scatters: Array) -> Curves:
        stages, at = self.basis.stages, self.positions
        table = recomputed(self.table(mesh, samples), stages.repeated(method.recompute))
        forward = table.forward + table.waits + EXPOSED * gathers
        backward = table.backward + table.backward_waits + EXPOSED * (gathers + scatters)
        if method.recompute == "full":
            held = stages.entered(mesh) * samples
        else:
            held = self._held(mesh, method.recompute == "selective") * samples
        return Curves(
            forward[at],
            backward[at],
            held[at],
            self._elements(mesh)[at],
            stages.entering(mesh)[at] * samples,
            np.broadcast_to(gathers, forward.shape)[at],
            np.broadcast_to(scatters, forward.shape)[at],
            self.basis.overhead,
        )

    def _beside(self, mesh: Degrees, kind: str, replicas: Ranks) -> Array:
        """Running sum over the nodes: seconds of a collective for every block's parameters, where they are first used.

        A cut through a block leaves each part its share.
        """
        sizes, bounds = self._gathered(mesh), np.array(self.basis.stages.blocks)
        blocks = np.add.reduceat(sizes, bounds[:-1])
        seconds = {size: network.collective(self.basis.cluster, kind, size, replicas, None) for size in set(blocks)}
        rates = np.array([seconds[size] / size if size else 0.0 for size in blocks])
        return np.concatenate([[0.0], np.cumsum(sizes * np.repeat(rates, np.diff(bounds)))])

    def _gathered(self, mesh: Degrees) -> Array:
        """Of every node, bytes of the trained parameters that it is the first to use, as a rank computes with them."""
        key = (mesh.sequence, mesh.tensor, "gathered")
        if key not in self._counted:
            sheet, graph = self.basis.stages.sheet(mesh), self.basis.stages.graph
            sizes = np.zeros(len(graph.nodes))
            for name, position in self.basis.stages.first_uses.items():
                if graph.parameters[name].trainable:
                    sizes[position] += sheet.bytes((f"parameter:{name}", 0), sheet.view.samples)
            self._counted[key] = sizes
        return self._counted[key]

    def closing(self, method: Method, elements: float, replicas: Ranks) -> tuple[float, float]:
        """Seconds in which replicas sum the gradients of so many elements, and hand out what each has updated."""
        size, cluster = elements * min(4, method.item), self.basis.cluster
        summed = network.collective(cluster, method.summing, size, replicas, None)
        return summed, network.collective(cluster, method.handing, size, replicas, None)

    def _held(self, mesh: Degrees, again: bool) -> Array:
        """Running sum over the nodes, as far as the positions go: bytes per sample that are kept of a microbatch."""
        key = (mesh.sequence, mesh.tensor, "held", again)
        if key not in self._counted:
            base = self.basis.stages.graph.samples
            residence = self.basis.stages.residence(mesh, base, again)
            held = np.zeros(len(self.basis.stages.graph.nodes) + 1)
            for position in self.positions[1:]:
                held[position] = residence.need([(0, int(position))]).live / base
            self._counted[key] = np.maximum.accumulate(held)
        return self._counted[key]

    def _elements(self, mesh: Degrees) -> Array:
        key = (mesh.sequence, mesh.tensor)
        if key not in self._counted:
            sheet, counts = self.basis.stages.sheet(mesh), np.zeros(len(self.basis.stages.graph.nodes) + 1)
            for name, position in self.basis.stages.first_uses.items():
                place = (f"parameter:{name}", 0)
                counts[position + 1] += sheet.bytes(place, sheet.view.samples) / sheet.itemsize(place)
            self._counted[key] = np.cumsum(counts)
        return self._counted[key]
