"""Table: what every node of a graph takes on one rank, for any number of samples in hand.

Nodes that are alike (the same operator on the same shapes, split alike) are priced once; a table is a few arrays over
the nodes with their running sums, so that any run of nodes costs two look-ups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polylane.cost.network.alpha_beta import RankSpeed, bytes_per_rank
from polylane.cost.network.redistribution import redistribute
from polylane.graph.graph import Graph
from polylane.placement.operator_view import (
    OperatorNode,
    OperatorView,
    TensorKey,
    ViewSizes,
    is_alias,
    tensor_key,
    view_operators,
)
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import Strategy

Shape = tuple[int, ...]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorWork:
    """One operator on one rank.

    Attributes:
        operator: the whole operator, at some number of samples.
        samples: in hand.
        inputs, outputs: shapes of what the rank has of its tensors.
        whole_inputs, whole_outputs: shapes of the whole tensors.
        work_share: of the whole operator's work that the busiest rank does, where that does not follow from the shapes.
        shares_statistics: whether it normalizes over a batch whose statistics replicas share.
    """

    operator: OperatorNode
    samples: int
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    whole_inputs: tuple[Shape, ...]
    whole_outputs: tuple[Shape, ...]
    work_share: float | None
    shares_statistics: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the rank computes all of it."""
        return self.work_share is None and (self.inputs, self.outputs) == (self.whole_inputs, self.whole_outputs)


class Clock(Protocol):
    """How long one operator takes on one rank."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds of its forward and of its backward pass (0 where no gradient flows)."""
        ...

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        """Seconds that the host takes to issue them; it runs ahead of the device, as far as it can."""
        ...


class CollectiveClock(Protocol):
    """How long ranks along one axis need for a collective."""

    def __call__(self, collective: str, size: float) -> float:
        """Seconds of "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "message" over ``size`` bytes."""
        ...


@dataclass(frozen=True)
class PricedRedistribution:
    """A tensor that some operators need otherwise than it is made, along one axis.

    Attributes:
        key: of the tensor.
        axis: along which it moves.
        first_position: position of the first node that needs it so.
        source, target: how it lies, and how it is needed.
        has_gradient: whether its gradient comes back.
    """

    key: TensorKey
    axis: str
    first_position: int
    source: Placement
    target: Placement
    has_gradient: bool


@dataclass(frozen=True)
class CostTable:
    """Running sums over a graph's nodes, for one number of samples: entry i is the sum of the nodes before i.

    Attributes:
        samples: in hand.
        forward, backward: seconds of computation.
        waits, backward_waits: seconds in collectives within the passes, on top.
        sent: bytes that the rank sends in these collectives, both ways.
        issued, backward_issued: seconds in which the host issues the computation: it goes on beside it, and counts
            where the device has less to do.
        stalled, backward_stalled: of the seconds of computation, those in which the device waits for the host.
    """

    samples: int
    forward: Array
    backward: Array
    waits: Array
    backward_waits: Array
    sent: Array
    issued: Array
    backward_issued: Array
    stalled: Array
    backward_stalled: Array

    def between(self, name: str, first: int, end: int) -> float:
        """The sum of one of the arrays over nodes first..end-1."""
        array: Array = getattr(self, name)
        return float(array[end] - array[first])


class ShardedGraphCost:
    """A graph and how it lies on the axes of a mesh, ready to be priced.

    Args:
        graph: what is priced.
        splits: by axis; none where one rank has the whole.
        samples: for which the splits were chosen.
        item: bytes of an element of a floating-point value, where passes run in another precision than the graph's.
        shown: the graph's view at so many samples, where it is known.
    """

    def __init__(
        self,
        graph: Graph,
        splits: Mapping[str, AxisSplit],
        samples: int,
        item: int | None = None,
        shown: OperatorView | None = None,
    ) -> None:
        self.graph, self.splits, self.float_itemsize = graph, dict(splits), item
        degree = max((split.degree for split in splits.values()), default=1)
        self.view: OperatorView = shown or view_operators(graph, samples, degree)
        self._concrete_sizes: dict[int, ViewSizes] = {}
        self._shapes: dict[tuple[TensorKey, int], Shape] = {}

    # ---- tensors -----------------------------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> Mapping[TensorKey, Tensor]:
        found: dict[TensorKey, Tensor] = {}
        for node in self.graph.code.fx.nodes:
            if node.op in ("placeholder", "call_function") and not is_alias(node):
                val = node.meta.get("val")
                several = val if isinstance(val, (list, tuple)) else [val]
                # A call counts only the tensors among what it gives.
                for index, each in enumerate(v for v in several if isinstance(v, Tensor)):
                    found[tensor_key(node)[0], index] = each
        return found

    def shape(self, key: TensorKey, samples: int) -> Shape:
        """Of a whole tensor."""
        if (key, samples) not in self._shapes:
            sizes = self._concrete_sizes.setdefault(samples, ViewSizes(samples))
            self._shapes[key, samples] = sizes.shape(self._tensors[key])
        return self._shapes[key, samples]

    def placements(self, key: TensorKey) -> tuple[Placement, ...]:
        """How a tensor lies where it is made, on every axis."""
        return tuple(split.placement(key) for split in self.splits.values())

    def busiest_bytes(self, key: TensorKey, samples: int, placements: Iterable[Placement] | None = None) -> float:
        """What the busiest rank has of a tensor."""
        placed = self.placements(key) if placements is None else placements
        return math.prod(busiest_local_shape(self.shape(key, samples), placed)) * self.itemsize(key)

    def busiest_shape(self, source: str) -> Shape:
        """What the busiest rank has of a parameter or buffer ("parameter:fc.weight")."""
        return busiest_local_shape(self.shape((source, 0), self.view.samples), self.placements((source, 0)))

    def itemsize(self, key: TensorKey) -> int:
        """Of an element of a tensor."""
        tensor = self._tensors[key]
        own = tensor.element_size()
        return min(own, self.float_itemsize) if self.float_itemsize is not None and tensor.is_floating_point() else own

    def busiest_value_bytes(self, name: str, samples: int) -> float:
        """Bytes that the busiest rank has of a node's value."""
        key = self.view.aliases.get(name, (name, 0))
        return self.busiest_bytes(key, samples) if key in self._tensors else 0.0

    # ---- nodes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _distinct_operators(self) -> list[tuple[OperatorNode, list[int]]]:
        """One step of every kind, and the positions of the nodes that are alike."""
        kinds: dict[Hashable, tuple[OperatorNode, list[int]]] = {}
        for step in self.view.operators:
            chosen = tuple((s.inputs, s.outputs, s.work, s.sent) for s in self._strategies(step))
            call = step.call
            fixed = tuple((n, repr(v)) for n, v in call.arguments.items() if n not in _ONE_OF_A_KIND)
            kind = (call.op, fixed, call.inputs, call.outputs, chosen, step.is_pinned)
            kinds.setdefault(kind, (step, []))[1].append(self.graph.positions[step.name])
        return list(kinds.values())

    def _strategies(self, step: OperatorNode) -> list[Strategy]:
        return [split.strategies[step.name] for split in self.splits.values()]

    @cached_property
    def redistributions(self) -> tuple[PricedRedistribution, ...]:
        """Every tensor that must move, to each placement once, however many operators need it so."""
        found: dict[tuple[str, TensorKey, Placement], PricedRedistribution] = {}
        end = len(self.graph.nodes) - 1
        for axis, split in self.splits.items():
            for step in self.view.operators:
                for key, needed in zip(step.input_keys, split.strategies[step.name].inputs, strict=True):
                    self._add_redistribution(found, axis, split, key, needed, self.graph.positions[step.name])
            for key in self.view.output_keys:
                self._add_redistribution(found, axis, split, key, REPLICATE, end)
        return tuple(found.values())

    @cached_property
    def _distinct_redistributions(self) -> list[tuple[PricedRedistribution, list[int], Array]]:
        """One move of every kind, the positions of the nodes before which such moves are, and how many at each."""
        kinds: dict[Hashable, tuple[PricedRedistribution, Counter[int]]] = {}
        for moved in self.redistributions:
            tensor = self._tensors[moved.key]
            form = tuple(size if isinstance(size, int) else size.node.expr for size in tensor.shape)
            kind = (
                moved.axis,
                moved.source,
                moved.target,
                moved.has_gradient,
                form,
                tensor.dtype,
                self._other_placements(moved),
            )
            kinds.setdefault(kind, (moved, Counter()))[1][moved.first_position] += 1
        return [(moved, list(at), np.array(list(at.values()), dtype=float)) for moved, at in kinds.values()]

    def _add_redistribution(
        self,
        found: dict[tuple[str, TensorKey, Placement], PricedRedistribution],
        axis: str,
        split: AxisSplit,
        key: TensorKey,
        needed: Placement,
        position: int,
    ) -> None:
        source = split.placement(key)
        if source != needed and (axis, key, needed) not in found:
            found[axis, key, needed] = PricedRedistribution(
                key, axis, position, source, needed, self._has_gradient(key)
            )

    def _has_gradient(self, key: TensorKey) -> bool:
        source = self.view.sources.get(key)
        if source is not None:
            return source.value.gradient
        return self._operators[key[0]].call.outputs[key[1]].gradient

    @cached_property
    def _operators(self) -> Mapping[str, OperatorNode]:
        return {step.name: step for step in self.view.operators}

    # ---- prices ------------------------------------------------------------------------------------------------------

    def table(
        self, samples: int, clock: Clock, exchange: Mapping[str, CollectiveClock], rates: RankSpeed | None = None
    ) -> CostTable:
        """What every node takes.

        Args:
            samples: in hand.
            clock: how long an operator takes on what a rank has of its tensors.
            exchange: how long collectives take, by axis; "data" where replicas share the statistics of a batch.
            rates: of one rank's memory, for copies that nothing travels for.
        """
        size = len(self.graph.nodes)
        compute, waits, issued = np.zeros((2, size)), np.zeros((2, size)), np.zeros((2, size))
        traffic = np.zeros(size)
        for step, positions in self._distinct_operators:
            sums = _statistics_bytes(step) if "data" in exchange else 0.0
            work = replace(self._operator_work(step, samples), shares_statistics=sums > 0)
            compute[:, positions] = np.array(clock(work))[:, None]
            issued[:, positions] = np.array(clock.issued(work))[:, None]
            if sums:
                shared = exchange["data"]("all_reduce", sums)
                waits[0, positions] += shared
                waits[1, positions] += shared if step.call.outputs[0].gradient else 0.0
                traffic[positions] += 2 * bytes_per_rank("all_reduce", sums, 2)
            for axis, strategy in zip(self.splits, self._strategies(step), strict=True):
                if strategy.messages:
                    scale = samples / self.view.samples
                    taken = strategy.messages * exchange[axis]("message", strategy.sent * scale / strategy.messages)
                    waits[:, positions] += taken / 2  # half of them on the way back
                    traffic[positions] += strategy.sent * scale
        for moved, positions, counts in self._distinct_redistributions:
            whole = self._redistributed_bytes(moved, samples)
            for way, (collective, copied) in enumerate(
                redistribute(whole, moved.source, moved.target, moved.has_gradient)
            ):
                if collective:
                    waits[way, positions] += counts * exchange[moved.axis](collective, whole)
                    traffic[positions] += counts * bytes_per_rank(collective, whole, self.splits[moved.axis].degree)
                elif rates is not None:
                    compute[way, positions] += counts * copied / rates.bytes
        return CostTable(
            samples, *(_running_sum(a) for a in (*compute, *waits, traffic, *issued, *np.zeros((2, size))))
        )

    def _operator_work(self, step: OperatorNode, samples: int) -> OperatorWork:
        strategies = self._strategies(step)
        whole_in = tuple(self.shape(key, samples) for key in step.input_keys)
        whole_out = tuple(self.shape(key, samples) for key in step.output_keys)
        inputs = tuple(
            busiest_local_shape(shape, [s.inputs[i] for s in strategies]) for i, shape in enumerate(whole_in)
        )
        outputs = tuple(
            busiest_local_shape(shape, [s.outputs[i] for s in strategies]) for i, shape in enumerate(whole_out)
        )
        told = any(s.work is not None for s in strategies)
        share = math.prod(s.share for s in strategies) if told else None
        return OperatorWork(step, samples, inputs, outputs, whole_in, whole_out, share)

    def _redistributed_bytes(self, moved: PricedRedistribution, samples: int) -> float:
        """Bytes of a tensor that moves along an axis, with the splits of the other axes."""
        return self.busiest_bytes(moved.key, samples, self._other_placements(moved))

    def _other_placements(self, moved: PricedRedistribution) -> tuple[Placement, ...]:
        """How the tensor lies on the other axes."""
        return tuple(s.placement(moved.key) for axis, s in self.splits.items() if axis != moved.axis)


def _statistics_bytes(step: OperatorNode) -> float:
    """Bytes of the statistics that replicas sum where an operator normalizes over a batch in training; 0 elsewhere.

    Two sums for each channel, in float64, forward and backward alike (see
    :mod:`polylane.graph.operators.sync_batch_norm`).
    """
    call = step.call
    if call.base != "batch_norm" or not call.arguments.get("training"):
        return 0.0
    return 2.0 * 8 * call.outputs[0].shape[1]


# Arguments that differ from node to node without any difference in cost: keys of random numbers.
_ONE_OF_A_KIND: Collection[str] = ("salt",)


def busiest_local_shape(shape: Shape, placements: Iterable[Placement]) -> Shape:
    """What the busiest rank has of a shape; where a dimension has another size than it was cut for, the same share."""
    sizes = list(shape)
    for placement in placements:
        if isinstance(placement, Shard):
            sizes[placement.dim] = math.ceil(sizes[placement.dim] * placement.largest_share - 1e-9)
    return tuple(sizes)


def _running_sum(array: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(array)])
