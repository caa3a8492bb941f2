"""Estimates: what stages of a graph take, for every start and end at once, so that thousands of plans can be compared.

Figures are those of `polylane.cost`, without the play of the schedule: a pipeline's time is its formula's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polylane.cluster.cluster import along
from polylane.cost import network
from polylane.cost.method import Method
from polylane.cost.predict import Basis
from polylane.cost.table import Exchange, Table
from polylane.graph.narrow import MOST, narrow_positions
from polylane.graph.partition import cut_positions
from polylane.plan.spec import Degrees
from polylane.planner.cuts import Array, Cuts


@dataclass(frozen=True)
class Curves:
    """Running sums over the positions where a graph may be cut, of one mesh and one number of samples.

    Attributes:
        forward, backward: seconds of a pass, waiting included.
        held: bytes kept of a microbatch.
        elements: of the parameters that a rank holds and trains, counted where they are first used.
        entering: bytes that a cut at each position makes travel to a rank, one way.
    """

    forward: Array
    backward: Array
    held: Array
    elements: Array
    entering: Array

    @property
    def passes(self) -> Array:
        """Seconds of both passes."""
        return self.forward + self.backward


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

    def exchange(self, mesh: Degrees, axis: str) -> Exchange:
        """Collectives along an axis of a mesh on neighbouring ranks."""
        ranks = along({"data": mesh.data, "sequence": mesh.sequence, "tensor": mesh.tensor}, axis)

        def seconds(collective: str, size: float) -> float:
            if collective == "message":
                return network.transfer(self.basis.cluster, size, ranks[0], ranks[1])
            return network.collective(self.basis.cluster, collective, size, ranks, None)

        return seconds

    def table(self, mesh: Degrees, samples: int) -> Table:
        """What every node takes on the slowest device."""
        basis = self.basis
        device = min(
            basis.cluster.devices(range(basis.cluster.count)), key=lambda d: d.speed * max(d.achieved.values())
        )
        axes = [axis for axis in ("sequence", "tensor") if getattr(mesh, axis) > 1]
        axes += ["data"] if self._sharing(mesh) > 1 else []
        exchange = {axis: self.exchange(mesh, axis) for axis in axes}
        rates = network.rates(basis.cluster, range(1), basis.method.dtype)
        return basis.stages.table(
            mesh, samples, ("estimate", self._sharing(mesh)), basis.clock(device), exchange, rates
        )

    def _sharing(self, mesh: Degrees) -> int:
        """How many replicas sum the statistics of a batch in the course of their passes."""
        return mesh.data if self.basis.stages.graph.code.batch_statistics else 1

    def curves(self, mesh: Degrees, samples: int, method: Method) -> Curves:
        """Of a rank with so many samples in hand."""
        key = (mesh.sequence, mesh.tensor, samples, method.recompute, self._sharing(mesh))
        if key not in self._curves:
            self._curves[key] = self._made(mesh, samples, method)
        return self._curves[key]

    def _made(self, mesh: Degrees, samples: int, method: Method) -> Curves:
        table, at = self.table(mesh, samples), self.positions
        forward = table.forward + table.waits
        backward = table.backward + table.backward_waits
        entering = self.basis.stages.entering(mesh)[at] * samples
        if method.recompute == "full":
            backward = backward + forward
            held = self.basis.stages.entered(mesh) * samples
        else:
            held = self._held(mesh) * samples
        return Curves(forward[at], backward[at], held[at], self._elements(mesh)[at], entering)

    def _held(self, mesh: Degrees) -> Array:
        """Running sum over the nodes, as far as the positions go: bytes per sample that are kept of a microbatch."""
        key = (mesh.sequence, mesh.tensor, "held")
        if key not in self._counted:
            base = self.basis.stages.graph.samples
            residence = self.basis.stages.residence(mesh, base)
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
