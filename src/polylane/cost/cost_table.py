"""Cost table: seconds and bytes of every node of a sharded graph on one rank, for any number of local samples.

Equal nodes (same operator, shapes and strategy) are priced once; a table is a few arrays over
the nodes with their running sums, so that any run of nodes costs two look-ups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.network.redistribution import redistribute
from polylane.cost.weight_halves import WeightHalves
from polylane.graph.graph import Graph
from polylane.placement import operator_view
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import Strategy

Shape = tuple[int, ...]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorWork:
    """One operator as one rank computes it.

    Attributes:
        operator: the unsharded operator, as viewed at the samples of the layout.
        samples: local samples of the rank for one microbatch.
        inputs, outputs: local shapes, those of the busiest rank, in the call's order.
        whole_inputs, whole_outputs: shapes of the unsharded tensors at ``samples``.
        work_share: fraction of the unsharded operator's work that the busiest rank does; None: it follows from the
            local shapes.
        shares_statistics: whether it is a batch normalization whose statistics are summed over replicas
            (SyncBatchNorm).
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
        """Whether the rank computes the unsharded operator."""
        return self.work_share is None and (self.inputs, self.outputs) == (self.whole_inputs, self.whole_outputs)


class Clock(Protocol):
    """Prices one operator on one rank: a roofline model or a measured profile."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        """Return the device's seconds of the forward and of the backward pass (0 where no gradient flows)."""
        ...

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        """Return the host's seconds to issue both passes; the host runs ahead of the device as far as it can."""
        ...


# Prices a collective among the ranks along one axis: (name, "message" or INTERLEAVED_SUM; bytes) -> seconds.
CollectiveClock = Callable[[str, float], float]

INTERLEAVED_SUM = "interleaved sum"  # a small all-reduce between two operators, for which all ranks wait


@dataclass(frozen=True)
class PricedRedistribution:
    """A tensor that operators read with another placement than it is produced with, along one axis.

    Attributes:
        key: name of the tensor's node or source, and the output index.
        axis: mesh axis of the redistribution: "sequence" or "tensor".
        first_position: position of the first node that reads it with the target placement.
        source, target: placement that it is produced with, and the one that is read.
        has_gradient: whether its gradient is redistributed back in the backward pass.
    """

    key: TensorKey
    axis: str
    first_position: int
    source: Placement
    target: Placement
    has_gradient: bool


@dataclass(frozen=True)
class CostTable:
    """Running sums over a graph's nodes, for one number of local samples: entry i is the sum of nodes 0..i-1.

    Attributes:
        samples: local samples of the rank for one microbatch.
        forward, backward: seconds of computation.
        waits, backward_waits: seconds of collectives inside the passes, on top of the computation.
        sent: bytes that the rank sends in these collectives, forward and backward.
        issued, backward_issued: seconds of the host to issue the operators; it runs ahead of the device, and delays it
            only where the device has less to do.
        stalled, backward_stalled: of the seconds of computation, those in which the device waits for the host.
        backward_weight: of ``backward``, seconds of gradients of weights, the second half of a backward pass in two.
        halving: seconds by which both halves of a backward pass take longer than the whole.
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
    backward_weight: Array
    halving: Array

    def between(self, name: str, first_node: int, end: int) -> float:
        """Return the sum of the array called ``name`` over nodes first..end-1."""
        array: Array = getattr(self, name)
        return float(array[end] - array[first_node])


class ShardedGraphCost:
    """A graph sharded over the axes of a mesh, ready to be priced.

    Args:
        graph: the captured graph; only its structure and symbolic shapes are read.
        splits: strategies and source placements by axis name; empty for an unsharded graph.
        samples: local samples for which the splits were chosen.
        item: bytes per floating-point element at most, where passes run in a lower precision than the graph.
        shown: the graph's operator view at ``samples``; built here if None.
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
        self.view: OperatorView = shown or operator_view.view_operators(graph, samples, degree)
        self._concrete_sizes: dict[int, operator_view.ViewSizes] = {}
        self._shapes: dict[tuple[TensorKey, int], Shape] = {}

    # ---- tensors -----------------------------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> Mapping[TensorKey, Tensor]:
        tensors: dict[TensorKey, Tensor] = {}
        for node in self.graph.code.fx.nodes:
            if node.op in ("placeholder", "call_function") and not operator_view.is_alias(node):
                val = node.meta.get("val")
                several = val if isinstance(val, (list, tuple)) else [val]
                # Output indices count only the tensors among a call's results, as the operator view does.
                for index, tensor in enumerate(v for v in several if isinstance(v, Tensor)):
                    tensors[operator_view.tensor_key(node)[0], index] = tensor
        return tensors

    def shape(self, key: TensorKey, samples: int) -> Shape:
        """Return the unsharded shape of a tensor at ``samples`` local samples."""
        if (key, samples) not in self._shapes:
            sizes = self._concrete_sizes.setdefault(samples, operator_view.ViewSizes(samples))
            self._shapes[key, samples] = sizes.shape(self._tensors[key])
        return self._shapes[key, samples]

    def placements(self, key: TensorKey) -> tuple[Placement, ...]:
        """Return the placement of a tensor where it is produced, one for each axis."""
        return tuple(split.placement(key) for split in self.splits.values())

    def busiest_bytes(self, key: TensorKey, samples: int, placements: Iterable[Placement] | None = None) -> float:
        """Return the bytes of a tensor on the busiest rank (default: with the placements it is produced with)."""
        placed = self.placements(key) if placements is None else placements
        return math.prod(busiest_local_shape(self.shape(key, samples), placed)) * self.itemsize(key)

    def busiest_shape(self, source: str) -> Shape:
        """Return the busiest rank's local shape of a parameter or buffer ("parameter:fc.weight")."""
        return busiest_local_shape(self.shape((source, 0), self.view.samples), self.placements((source, 0)))

    def busiest_bytes_of(self, kind: str, name: str, total_bytes: int) -> float:
        """Return the bytes of a parameter or buffer on the busiest rank, in its own dtype.

        Args:
            kind: kind of the tensors, "parameter" or "buffer".
            name: canonical name of it.
            total_bytes: bytes of all of it, which count where no operator of the graph reads it.
        """
        key = (f"{kind}:{name}", 0)
        if key not in self._tensors:
            return float(total_bytes)
        elements = math.prod(self._tensors[key].shape)
        return total_bytes * math.prod(self.busiest_shape(key[0])) / elements if elements else 0.0

    def itemsize(self, key: TensorKey) -> int:
        """Return bytes per element of a tensor as the passes compute with it."""
        tensor = self._tensors[key]
        size = tensor.element_size()
        return (
            min(size, self.float_itemsize) if self.float_itemsize is not None and tensor.is_floating_point() else size
        )

    def busiest_value_bytes(self, name: str, samples: int) -> float:
        """Return the bytes of a node's value on the busiest rank; 0 for values that are no tensor."""
        key = self.view.aliases.get(name, (name, 0))
        return self.busiest_bytes(key, samples) if key in self._tensors else 0.0

    # ---- nodes -------------------------------------------------------------------------------------------------------

    @cached_property
    def _distinct_operators(self) -> list[tuple[OperatorNode, list[int]]]:
        """One operator of every kind, with the positions of all nodes of that kind."""
        # The kind holds all that a price can depend on: a 100-layer model costs as much to price as one layer.
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
        """All redistributions: each tensor once for every placement that it is read with, however many readers."""
        redistributions: dict[tuple[str, TensorKey, Placement], PricedRedistribution] = {}
        end = len(self.graph.nodes) - 1
        for axis, split in self.splits.items():
            reads = [
                (key, needed, self.graph.positions[step.name])
                for step in self.view.operators
                for key, needed in zip(step.input_keys, split.strategies[step.name].inputs, strict=True)
            ]
            # Outputs of the graph (the loss) are needed replicated, at the end of the last node.
            reads += [(key, REPLICATE, end) for key in self.view.output_keys]
            for key, needed, position in reads:
                source = split.placement(key)
                if source != needed and (axis, key, needed) not in redistributions:
                    redistributions[axis, key, needed] = PricedRedistribution(
                        key, axis, position, source, needed, self._has_gradient(key)
                    )
        return tuple(redistributions.values())

    @cached_property
    def _distinct_redistributions(self) -> list[tuple[PricedRedistribution, list[int], Array]]:
        """One redistribution of every kind, the positions of its first readers, and how many there are at each."""
        kinds: dict[Hashable, tuple[PricedRedistribution, Counter[int]]] = {}
        for moved in self.redistributions:
            tensor = self._tensors[moved.key]
            # SymInts are unhashable; their sympy expressions are, and compare equal for equal sizes.
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

    def _has_gradient(self, key: TensorKey) -> bool:
        source = self.view.sources.get(key)
        if source is not None:
            return source.value.gradient
        return self._operators[key[0]].call.outputs[key[1]].gradient

    @cached_property
    def _operators(self) -> Mapping[str, OperatorNode]:
        return {step.name: step for step in self.view.operators}

    @cached_property
    def weight_halves(self) -> WeightHalves:
        """The calls whose weight gradient may come later."""
        return WeightHalves(self.graph, self.view, self.splits)

    # ---- prices ------------------------------------------------------------------------------------------------------

    def table(
        self, samples: int, clock: Clock, exchange: Mapping[str, CollectiveClock], memory: float = math.inf
    ) -> CostTable:
        """Price every node.

        Args:
            samples: local samples of the rank for one microbatch.
            clock: prices an operator on the rank's local shapes.
            exchange: prices collectives, by axis; has "data" if replicas sum the statistics of batch normalization.
            memory: bytes per second of the rank's own memory, for redistributions that only copy locally.
        """
        size = len(self.graph.nodes)
        # Rows of the 2-row arrays: forward, backward.
        compute, waits, issued = np.zeros((2, size)), np.zeros((2, size)), np.zeros((2, size))
        traffic, weight, shares = np.zeros(size), np.zeros(size), self.weight_halves.shares
        for step, positions in self._distinct_operators:
            # SyncBatchNorm: an all-reduce over replicas in each direction that runs.
            sums = _statistics_bytes(step) if "data" in exchange else 0.0
            work = replace(self._operator_work(step, samples), shares_statistics=sums > 0)
            compute[:, positions] = np.array(clock(work))[:, None]
            weight[positions] = compute[1, positions] * shares[positions]
            issued[:, positions] = np.array(clock.issued(work))[:, None]
            if sums:
                shared = exchange["data"](INTERLEAVED_SUM, sums)
                waits[0, positions] += shared
                waits[1, positions] += shared if step.call.outputs[0].gradient else 0.0
                traffic[positions] += 2 * bytes_per_rank("all_reduce", sums, 2)
            for axis, strategy in zip(self.splits, self._strategies(step), strict=True):
                # Point-to-point messages inside an operator (ring attention, halo exchange); their
                # bytes grow with the local samples.
                if strategy.messages:
                    scale = samples / self.view.samples
                    seconds = strategy.messages * exchange[axis]("message", strategy.sent * scale / strategy.messages)
                    waits[:, positions] += seconds / 2  # half of them on the way back
                    traffic[positions] += strategy.sent * scale
        # Redistributions are charged to their first reader; way 0 is the tensor, way 1 its gradient.
        for moved, positions, counts in self._distinct_redistributions:
            # Bytes of the tensor, sharded on all axes but the one of the redistribution.
            nbytes = self.busiest_bytes(moved.key, samples, self._other_placements(moved))
            for way, (collective, copied) in enumerate(
                redistribute(nbytes, moved.source, moved.target, moved.has_gradient)
            ):
                if collective:
                    waits[way, positions] += counts * exchange[moved.axis](collective, nbytes)
                    traffic[positions] += counts * bytes_per_rank(collective, nbytes, self.splits[moved.axis].degree)
                else:
                    compute[way, positions] += counts * copied / memory
        # Filled later: what is stalled by limit_by_host, block by block, and the price of halving by add_halving.
        none = np.zeros((2, size))
        return CostTable(
            samples,
            *(_running_sum(a) for a in (*compute, *waits, traffic, *issued, *none, weight, none[0])),
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
        has_work_share = any(s.work is not None for s in strategies)
        share = math.prod(s.share for s in strategies) if has_work_share else None
        return OperatorWork(step, samples, inputs, outputs, whole_in, whole_out, share)

    def _other_placements(self, moved: PricedRedistribution) -> tuple[Placement, ...]:
        """Return the tensor's placements on the other axes."""
        return tuple(s.placement(moved.key) for axis, s in self.splits.items() if axis != moved.axis)


def _statistics_bytes(step: OperatorNode) -> float:
    """Return the bytes of batch statistics that replicas sum for a batch normalization in training; 0 for others.

    Two sums for each channel, in float64, forward and backward alike (see
    :mod:`polylane.graph.operators.sync_batch_norm`). A model in float64 whose means are large beside their variances
    takes one more forward, of half as many bytes, which depends on the values: it is not priced.
    """
    call = step.call
    if call.base != "batch_norm" or not call.arguments.get("training"):
        return 0.0
    return 2.0 * 8 * call.outputs[0].shape[1]


# Arguments that differ from node to node and do not change the cost: the salts of random number streams.
_ONE_OF_A_KIND: Collection[str] = ("salt",)


def busiest_local_shape(shape: Shape, placements: Iterable[Placement]) -> Shape:
    """Return the busiest rank's local shape; a dimension of another size than was sharded keeps the largest share."""
    sizes = list(shape)
    for placement in placements:
        if isinstance(placement, Shard):
            # 1e-9 keeps an exact share such as 1/3 of 9 from being rounded up to 4.
            sizes[placement.dim] = math.ceil(sizes[placement.dim] * placement.largest_share - 1e-9)
    return tuple(sizes)


def _running_sum(array: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(array)])
