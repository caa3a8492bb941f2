"""What one rank of a stage takes: seconds of its passes, bytes that it holds and sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polylane.cost.communicate import Rates
from polylane.cost.table import Array, Clock, Exchange, Sheet, Table
from polylane.graph.graph import Graph
from polylane.graph.narrow import crossing_bytes, narrow_positions
from polylane.placement.placement import SHARED
from polylane.placement.rewrite import Split
from polylane.plan.spec import Degrees

# Nodes first..end-1 of a graph.
Range = tuple[int, int]
# How the operators of a graph are split on a mesh: by axis.
Lay = Callable[[Degrees], Mapping[str, Split]]


@dataclass(frozen=True)
class Passes:
    """One microbatch on one rank of a stage.

    Attributes:
        forward, backward: seconds of computation.
        waits, backward_waits: seconds in collectives within the passes, on top.
        sent: bytes sent in these collectives, both ways.
        held: bytes that autograd keeps from the forward to the backward pass.
    """

    forward: float
    backward: float
    waits: float
    backward_waits: float
    sent: float
    held: float

    @property
    def total(self) -> float:
        """Seconds of both passes, waiting included."""
        return self.forward + self.backward + self.waits + self.backward_waits


@dataclass(frozen=True)
class Weights:
    """The parameters of one rank of a stage.

    Attributes:
        elements: that the rank holds.
        trained: of them, those that have gradients and optimizer states.
        largest: of the largest parameter.
        tensors: how many parameters are trained.
        summed: elements whose gradients are summands along an axis of the mesh, by axis.
    """

    elements: int
    trained: int
    largest: int
    tensors: int
    summed: Mapping[str, int]


class Stages:
    """Prices stages of one graph: every table is made once.

    Args:
        graph: what is split.
        lay: how its operators lie on a mesh.
        samples: for which they were chosen.
        sheet: makes a sheet of the graph with such splits (see :class:`polylane.cost.table.Sheet`).
    """

    def __init__(self, graph: Graph, lay: Lay, sheet: Callable[[Mapping[str, Split]], Sheet]) -> None:
        self.graph, self._lay, self._make = graph, lay, sheet
        self._sheets: dict[tuple[int, int], Sheet] = {}
        self._tables: dict[tuple[object, ...], Table] = {}

    def sheet(self, mesh: Degrees) -> Sheet:
        """The graph as it lies on the operator axes of a mesh."""
        key = (mesh.sequence, mesh.tensor)
        if key not in self._sheets:
            self._sheets[key] = self._make(self._lay(mesh) if key != (1, 1) else {})
        return self._sheets[key]

    def table(
        self,
        mesh: Degrees,
        samples: int,
        where: object,
        clock: Clock,
        exchange: Mapping[str, Exchange],
        rates: Rates | None = None,
    ) -> Table:
        """What every node takes; ``where`` names clock and exchange: equal ones give equal times."""
        key = (mesh.sequence, mesh.tensor, samples, where)
        if key not in self._tables:
            self._tables[key] = self.sheet(mesh).table(samples, clock, exchange, rates)
        return self._tables[key]

    def weights(self, mesh: Degrees, pieces: Sequence[Range]) -> Weights:
        """The parameters that a rank of a stage holds."""
        names = {name for first, end in pieces for i in range(first, end) for name in self.graph.nodes[i].parameters}
        return self._weigh(mesh, names)

    def _weigh(self, mesh: Degrees, names: set[str]) -> Weights:
        sheet = self.sheet(mesh)
        total = trained = largest = tensors = 0
        summed: dict[str, int] = {}
        for name in names:
            key = (f"parameter:{name}", 0)
            elements = int(sheet.bytes(key, sheet.view.samples) // sheet.itemsize(key))
            total, largest = total + elements, max(largest, elements)
            if self.graph.parameters[name].trainable:
                trained, tensors = trained + elements, tensors + 1
                for axis, split in sheet.splits.items():
                    if split.sources.get(key) == SHARED:
                        summed[axis] = summed.get(axis, 0) + elements
        return Weights(total, trained, largest, tensors, summed)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Positions between which lie the blocks that are recomputed, or gathered, as one; both ends included."""
        return (0, *narrow_positions(self.graph, most=1 << 30), len(self.graph.nodes))

    @cached_property
    def _crossing(self) -> Array:
        return crossing_bytes(self.graph)

    def crossing(self, position: int, samples: int) -> float:
        """Bytes of the values that a cut at a position makes travel forward, whole, of so many samples."""
        return float(self._crossing[position]) * samples / self.graph.samples


def passes(table: Table, pieces: Sequence[Range]) -> Passes:
    """What a stage of these nodes takes, without recomputation."""
    names = ("forward", "backward", "waits", "backward_waits", "sent", "held")
    return Passes(*(sum(table.between(name, first, end) for first, end in pieces) for name in names))


def recomputed(plain: Passes, boundaries: Sequence[float], block: float) -> Passes:
    """Full recomputation: only what enters the blocks is kept, and a block is computed again before its backward pass.

    Args:
        plain: without it.
        boundaries: bytes that enter each block.
        block: bytes that the largest block keeps while it is passed backward.

    Blocks are joined so that the least is held (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016):
    with g blocks as one, 1/g of the boundaries and g blocks' values.
    """
    enters, inside = float(np.sum(boundaries)), block
    joined = max(1.0, (enters / inside) ** 0.5 if inside > 0 else 1.0)
    return Passes(
        plain.forward,
        plain.backward + plain.forward,
        plain.waits,
        plain.backward_waits + plain.waits,
        plain.sent * 1.5,
        min(plain.held, enters / joined),
    )
