"""Table: what every node of a graph takes on one rank, for any number of samples in hand.

Nodes that are alike (the same operator on the same shapes, split alike) are priced once; a table is a few arrays over
the nodes with their running sums, so that any run of nodes costs two look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polylane.cost.communicate import Rates, sent
from polylane.graph.graph import Graph
from polylane.placement.call import Strategy
from polylane.placement.move import name_of
from polylane.placement.placement import REPLICATE, Partial, Placement, Replicate, Shard, gradient
from polylane.placement.rewrite import Split
from polylane.placement.view import Key, Sizes, Step, View, is_alias, key_of, view

Shape = tuple[int, ...]
Array = NDArray[np.float64]


class Clock(Protocol):
    """How long one operator takes on one rank."""

    def __call__(
        self, step: Step, samples: int, inputs: Sequence[Shape], outputs: Sequence[Shape], share: float | None
    ) -> tuple[float, float]:
        """Seconds of its forward and of its backward pass (0 where no gradient flows).

        Args:
            step: the whole operator, at some number of samples.
            samples: in hand.
            inputs, outputs: shapes of what the rank has of its tensors.
            share: of the whole operator's work that the busiest rank does, where that does not follow from the shapes.
        """
        ...


class Exchange(Protocol):
    """How long ranks along one axis need for a collective."""

    def __call__(self, collective: str, size: float) -> float:
        """Seconds of "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "message" over ``size`` bytes."""
        ...


@dataclass(frozen=True)
class Moved:
    """A tensor that some operators need otherwise than it is made, along one axis.

    Attributes:
        key: of the tensor.
        axis: along which it moves.
        first: position of the first node that needs it so.
        source, target: how it lies, and how it is needed.
        flows: whether its gradient comes back.
    """

    key: Key
    axis: str
    first: int
    source: Placement
    target: Placement
    flows: bool


@dataclass(frozen=True)
class Table:
    """Running sums over a graph's nodes, for one number of samples: entry i is the sum of the nodes before i.

    Attributes:
        samples: in hand.
        forward, backward: seconds of computation.
        waits, backward_waits: seconds in collectives within the passes, on top.
        sent: bytes that the rank sends in these collectives, both ways.
        held: bytes that autograd keeps from a forward pass to the backward pass, of each tensor once.
    """

    samples: int
    forward: Array
    backward: Array
    waits: Array
    backward_waits: Array
    sent: Array
    held: Array

    def between(self, name: str, first: int, end: int) -> float:
        """The sum of one of the arrays over nodes first..end-1."""
        array: Array = getattr(self, name)
        return float(array[end] - array[first])


@dataclass(frozen=True)
class Kept:
    """What autograd keeps of one operator: numbers of its inputs and outputs, and bytes of its own (whole)."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    own: int = 0


class Sheet:
    """A graph and how it lies on the axes of a mesh, ready to be priced.

    Args:
        graph: what is priced.
        splits: by axis; none where one rank has the whole.
        samples: for which the splits were chosen.
        kept: what autograd keeps, by node.
        item: bytes of an element of a floating-point value, where passes run in another precision than the graph's.
    """

    def __init__(
        self,
        graph: Graph,
        splits: Mapping[str, Split],
        samples: int,
        kept: Callable[[str], Kept] | None = None,
        item: int | None = None,
    ) -> None:
        self.graph, self.splits, self.item = graph, dict(splits), item
        degree = max((split.degree for split in splits.values()), default=1)
        self.view: View = view(graph, samples, degree)
        self._kept = kept or (lambda name: Kept())
        self._sizes: dict[int, Sizes] = {}
        self._shapes: dict[tuple[Key, int], Shape] = {}

    # ---- tensors -----------------------------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> Mapping[Key, Tensor]:
        found: dict[Key, Tensor] = {}
        for node in self.graph.code.fx.nodes:
            if node.op in ("placeholder", "call_function") and not is_alias(node):
                val = node.meta.get("val")
                several = val if isinstance(val, (list, tuple)) else [val]
                # A call counts only the tensors among what it gives.
                for index, each in enumerate(v for v in several if isinstance(v, Tensor)):
                    found[key_of(node)[0], index] = each
        return found

    def shape(self, key: Key, samples: int) -> Shape:
        """Of a whole tensor."""
        if (key, samples) not in self._shapes:
            sizes = self._sizes.setdefault(samples, Sizes(samples))
            self._shapes[key, samples] = sizes.shape(self._tensors[key])
        return self._shapes[key, samples]

    def placements(self, key: Key) -> tuple[Placement, ...]:
        """How a tensor lies where it is made, on every axis."""
        return tuple(split.placement(key) for split in self.splits.values())

    def bytes(self, key: Key, samples: int, placements: Iterable[Placement] | None = None) -> float:
        """What the busiest rank has of a tensor."""
        placed = self.placements(key) if placements is None else placements
        return math.prod(local(self.shape(key, samples), placed)) * self.itemsize(key)

    def itemsize(self, key: Key) -> int:
        """Of an element of a tensor."""
        tensor = self._tensors[key]
        own = tensor.element_size()
        return min(own, self.item) if self.item is not None and tensor.is_floating_point() else own

    def value(self, name: str, samples: int) -> float:
        """Bytes that the busiest rank has of a node's value."""
        key = self.view.aliases.get(name, (name, 0))
        return self.bytes(key, samples) if key in self._tensors else 0.0

    # ---- nodes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _kinds(self) -> list[tuple[Step, list[int]]]:
        """One step of every kind, and the positions of the nodes that are alike."""
        kinds: dict[Hashable, tuple[Step, list[int]]] = {}
        for step in self.view.steps:
            chosen = tuple((s.inputs, s.outputs, s.work, s.sent) for s in self._strategies(step))
            call = step.call
            fixed = tuple((n, repr(v)) for n, v in call.arguments.items() if n not in _ONE_OF_A_KIND)
            kind = (call.op, fixed, call.inputs, call.outputs, chosen, step.pinned)
            kinds.setdefault(kind, (step, []))[1].append(self.graph.positions[step.name])
        return list(kinds.values())

    def _strategies(self, step: Step) -> list[Strategy]:
        return [split.steps[step.name] for split in self.splits.values()]

    @cached_property
    def moves(self) -> tuple[Moved, ...]:
        """Every tensor that must move, to each placement once, however many operators need it so."""
        found: dict[tuple[str, Key, Placement], Moved] = {}
        end = len(self.graph.nodes) - 1
        for axis, split in self.splits.items():
            for step in self.view.steps:
                for key, needed in zip(step.reads, split.steps[step.name].inputs, strict=True):
                    self._needs(found, axis, split, key, needed, self.graph.positions[step.name])
            for key in self.view.results:
                self._needs(found, axis, split, key, REPLICATE, end)
        return tuple(found.values())

    def _needs(
        self,
        found: dict[tuple[str, Key, Placement], Moved],
        axis: str,
        split: Split,
        key: Key,
        needed: Placement,
        position: int,
    ) -> None:
        source = split.placement(key)
        if source != needed and (axis, key, needed) not in found:
            found[axis, key, needed] = Moved(key, axis, position, source, needed, self._flows(key))

    def _flows(self, key: Key) -> bool:
        source = self.view.sources.get(key)
        if source is not None:
            return source.value.gradient
        return self._steps[key[0]].call.outputs[key[1]].gradient

    @cached_property
    def _steps(self) -> Mapping[str, Step]:
        return {step.name: step for step in self.view.steps}

    # ---- prices ------------------------------------------------------------------------------------------------------

    def table(self, samples: int, clock: Clock, exchange: Mapping[str, Exchange], rates: Rates | None = None) -> Table:
        """What every node takes.

        Args:
            samples: in hand.
            clock: how long an operator takes on what a rank has of its tensors.
            exchange: how long collectives take, by axis.
            rates: of one rank's memory, for copies that nothing travels for.
        """
        size = len(self.graph.nodes)
        compute, waits = np.zeros((2, size)), np.zeros((2, size))
        traffic = np.zeros(size)
        for step, positions in self._kinds:
            compute[:, positions] = np.array(self._timed(step, samples, clock))[:, None]
            for axis, strategy in zip(self.splits, self._strategies(step), strict=True):
                if strategy.messages:
                    scale = samples / self.view.samples
                    taken = strategy.messages * exchange[axis]("message", strategy.sent * scale / strategy.messages)
                    waits[:, positions] += taken / 2  # half of them on the way back
                    traffic[positions] += strategy.sent * scale
        known: dict[Hashable, float] = {}
        for moved in self.moves:
            for way, (source, target) in enumerate(_ways(moved)):
                whole, collective = self._moving(moved, samples), name_of(source, target)
                if collective:
                    price = (moved.axis, collective, whole)
                    if price not in known:
                        known[price] = exchange[moved.axis](collective, whole)
                    waits[way, moved.first] += known[price]
                    traffic[moved.first] += sent(collective, whole, self.splits[moved.axis].degree)
                elif rates is not None:
                    compute[way, moved.first] += _copied(whole, source, target) / rates.bytes
        held = self._held(samples)
        return Table(samples, *(_running(a) for a in (*compute, *waits, traffic, held)))

    def _timed(self, step: Step, samples: int, clock: Clock) -> tuple[float, float]:
        strategies = self._strategies(step)
        inputs = [
            local(self.shape(key, samples), [s.inputs[i] for s in strategies]) for i, key in enumerate(step.reads)
        ]
        outputs = [
            local(self.shape(key, samples), [s.outputs[i] for s in strategies]) for i, key in enumerate(step.gives)
        ]
        told = any(s.work is not None for s in strategies)
        return clock(step, samples, inputs, outputs, math.prod(s.share for s in strategies) if told else None)

    def _moving(self, moved: Moved, samples: int) -> float:
        """Bytes of a tensor that moves along an axis, with the splits of the other axes."""
        others = [s.placement(moved.key) for axis, s in self.splits.items() if axis != moved.axis]
        return self.bytes(moved.key, samples, others)

    def _held(self, samples: int) -> Array:
        """Bytes that are kept, where the first operator stands that keeps them; parameters are there anyway."""
        held = np.zeros(len(self.graph.nodes))
        seen: set[tuple[Key, tuple[Placement, ...]]] = set()
        for step in self.view.steps:
            kept, strategies = self._kept(step.name), self._strategies(step)
            position = self.graph.positions[step.name]
            which = [(step.reads[i], tuple(s.inputs[i] for s in strategies)) for i in kept.inputs]
            which += [(step.gives[i], tuple(s.outputs[i] for s in strategies)) for i in kept.outputs]
            for key, placed in which:
                if (key, placed) not in seen and not self._is_parameter(key):
                    seen.add((key, placed))
                    held[position] += self.bytes(key, samples, placed)
            if kept.own:
                shares = [max((p.largest for p in s.outputs if isinstance(p, Shard)), default=1.0) for s in strategies]
                held[position] += kept.own * math.prod(shares) * samples / self.view.samples
        return held

    def _is_parameter(self, key: Key) -> bool:
        source = self.view.sources.get(key)
        return source is not None and source.role[0] in ("parameter", "buffer", "constant")


# Arguments that differ from node to node without any difference in cost: keys of random numbers.
_ONE_OF_A_KIND: Collection[str] = ("salt",)


def local(shape: Shape, placements: Iterable[Placement]) -> Shape:
    """What the busiest rank has of a shape; where a dimension has another size than it was cut for, the same share."""
    sizes = list(shape)
    for placement in placements:
        if isinstance(placement, Shard):
            sizes[placement.dim] = math.ceil(sizes[placement.dim] * placement.largest - 1e-9)
    return tuple(sizes)


def _ways(moved: Moved) -> Sequence[tuple[Placement, Placement]]:
    """There, and the gradient back."""
    there = (moved.source, moved.target)
    return (there, (gradient(moved.target), gradient(moved.source))) if moved.flows else (there,)


def _copied(size: float, source: Placement, target: Placement) -> float:
    """Bytes that a rank writes where nothing travels: a part of its own, or zeros around it."""
    if isinstance(source, Replicate):
        return size * (target.largest if isinstance(target, Shard) else float(isinstance(target, Partial)))
    return size if isinstance(source, Shard) and isinstance(target, Partial) else 0.0


def _running(array: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(array)])
