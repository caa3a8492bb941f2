"""Strategies: one operator with concrete shapes (OperatorCall), one way to split it, and the call that a rank makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from polylane.placement.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Cuts,
    Placement,
    Replicate,
    Shard,
    even_cuts,
    local_shape,
)

# A dimension of one of a call's tensors: (side, index of the tensor, dim), with side "in" or "out".
Place = tuple[str, int, int]


@dataclass(frozen=True)
class TensorValue:
    """A tensor that a call reads or returns.

    Attributes:
        shape: the whole tensor's shape at the view's number of samples.
        dtype: dtype of the tensor's elements.
        gradient: whether a gradient flows back through the tensor.
        index: position among the call's inputs, or outputs; the same tensor read twice is two inputs.
        side: "in" for an input of the call, "out" for an output.
        ragged: dimensions whose sizes depend on data, of which the shape has those of the example.
        is_sparse: whether it has not all elements in memory, so that it is whole on every rank.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    index: int
    side: str = "in"
    ragged: tuple[int, ...] = ()
    is_sparse: bool = False

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def at(self, dim: int) -> Place:
        """Return one of the tensor's dimensions as a place; ``dim`` counts from either end."""
        return self.side, self.index, dim % max(self.dim, 1)


@dataclass(frozen=True)
class OperatorCall:
    """One operator of the graph with concrete shapes, as a rule sees it.

    Attributes:
        op: "aten.linear.default"; "leaf", "function" or another name for what is no operator of torch's.
        arguments: by the name in torch's schema, defaults included; tensors as :class:`TensorValue`, sizes as numbers.
        inputs: all tensors that the operator reads, in the order of ``arguments``.
        outputs: the tensors that the operator returns.
        degree: number of ranks along the axis in question.
        written_inputs: indices of the inputs that the operator writes in place.
        neighbour_cuts: cuts that neighbouring operators ask for, by dimension.
        prefix: number of leading positional arguments that are not torch's (the sample slice, a random key).
        only_cuts: the cuts to offer, by dimension, where no others are wanted; None: even ones, and the neighbours'.
    """

    op: str
    arguments: Mapping[str, Any]
    inputs: tuple[TensorValue, ...]
    outputs: tuple[TensorValue, ...]
    degree: int
    written_inputs: frozenset[int] = frozenset()
    neighbour_cuts: Mapping[Place, tuple[Cuts, ...]] = field(default_factory=dict)
    prefix: int = 0
    only_cuts: Mapping[Place, Cuts] | None = None

    @cached_property
    def base(self) -> str:
        """The operator's name without library and overload: "linear"."""
        return self.op.split(".")[1] if self.op.startswith("aten.") else self.op

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def common_cuts(self, *places: Place) -> list[Cuts]:
        """Return the cuts to offer for dimensions that are cut alike: the even one, and those neighbours ask for."""
        if self.only_cuts is not None:
            return [self.only_cuts[place] for place in places if place in self.only_cuts][:1]
        offered_cuts: dict[Cuts, None] = {}
        side, index, dim = places[0]
        size = (self.inputs if side == "in" else self.outputs)[index].shape[dim]
        if size > 1:
            offered_cuts[even_cuts(size, self.degree)] = None
            for place in places:
                offered_cuts.update(dict.fromkeys(self.neighbour_cuts.get(place, ())))
        return list(offered_cuts)

    def matching_cuts(
        self, source: Place, target: Place, onward: Callable[[Cuts], Cuts | None], back: Callable[[Cuts], Cuts | None]
    ) -> list[tuple[Cuts, Cuts]]:
        """Return cuts of two dimensions that fit together: those to offer for either, carried over to the other.

        Args:
            source, target: the two dimensions, mostly of an input and of an output.
            onward, back: return the other dimension's cuts for those of source, or of target; None where none fit.
        """
        pairs: list[tuple[Cuts | None, Cuts | None]] = [(cuts, onward(cuts)) for cuts in self.common_cuts(source)]
        pairs += [(back(cuts), cuts) for cuts in self.common_cuts(target)]
        return list(dict.fromkeys((a, b) for a, b in pairs if a is not None and b is not None))

    def strategy(
        self,
        name: str,
        inputs: Mapping[int, Placement],
        outputs: Placement | Sequence[Placement],
        default: Placement = REPLICATE_PARTIAL_GRAD,
        **options: Any,
    ) -> Strategy:
        """Return a strategy in which inputs that are not named (by their index) are placed like ``default``."""
        placements = outputs if isinstance(outputs, (list, tuple)) else [outputs] * len(self.outputs)
        # Rules may write REPLICATE_PARTIAL_GRAD for integers and frozen tensors too: those have no gradient to be
        # partial.
        placed = tuple(_without_partial_gradient(inputs.get(v.index, default), v) for v in self.inputs)
        targets = tuple(_without_partial_gradient(p, v) for p, v in zip(placements, self.outputs, strict=True))
        return Strategy(name, placed, targets, **options)


def _without_partial_gradient(placement: Placement, value: TensorValue) -> Placement:
    """Return plain Replicate for a value without gradient, any other placement unchanged."""
    return REPLICATE if isinstance(placement, Replicate) and not value.gradient else placement


@dataclass(frozen=True)
class Strategy:
    """One way to compute an operator on the ranks of an axis.

    Attributes:
        name: description for users: "columns", "rows", "heads", "replicate".
        inputs: the placement that every input must have.
        outputs: the placement that every output then has.
        local: changes the call that each rank makes; None where the operator runs unchanged on its parts.
        work: share of the operator's work on the busiest rank; None: the largest share of any sharded tensor.
        sent: bytes that each rank sends inside the operator, forward and backward together (halos, rings).
        messages: number of exchanges inside the operator, forward and backward together.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: Callable[[RankCall], None] | None = field(default=None, compare=False)
    work: float | None = None
    sent: int = 0
    messages: int = 0

    @property
    def share(self) -> float:
        """The share of the operator's work on the busiest rank."""
        if self.work is not None:
            return self.work
        return max((p.largest_share for p in (*self.inputs, *self.outputs) if isinstance(p, Shard)), default=1.0)


@dataclass
class RankCall:
    """The call that one rank makes, while the strategies of all axes change it one after another.

    Attributes:
        call: the whole call, before any axis splits it.
        graph: one rank's graph, to which the call is written.
        target: the function that is called; see :meth:`replace`.
        prefix: leading positional arguments that are not torch's.
        arguments: the local call's arguments by the name in torch's schema: nodes of the graph where the whole call has
            tensors. Strategies change them freely.
        positional: names of the arguments that are passed by position.
        output_placements: placements of every output, by axis.
        coordinates: this rank's index on each axis, by axis name.
        index: this rank's position on the axis in question.
        axis: the axis as a node of the graph: the first argument of operators that communicate.
        strategy: the axis's strategy, whose ``local`` is changing the call.
    """

    call: OperatorCall
    graph: fx.Graph
    target: Any
    prefix: Sequence[Any]
    arguments: dict[str, Any]
    positional: Sequence[str]
    output_placements: Sequence[Mapping[str, Placement]]
    coordinates: Mapping[str, int]
    index: int = 0
    axis: fx.Node = field(init=False)
    strategy: Strategy = field(init=False)
    _final: tuple[Any, ...] | None = None
    _after: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    def input_shard(self, index: int = 0) -> Shard:
        """Return the placement of an input that the axis's strategy shards."""
        return _require_shard(self.strategy.inputs[index])

    def output_shard(self) -> Shard:
        """Return the placement of the first output, which the axis's strategy shards."""
        return _require_shard(self.strategy.outputs[0])

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's part of an output, with the splits of all axes."""
        shape = self.call.outputs[index].shape
        for axis, placement in self.output_placements[index].items():
            shape = local_shape(shape, placement, self.coordinates[axis])
        return shape

    def insert(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """Write a computation before the call; its value may take the place of an argument."""
        return self.graph.call_function(function, args)

    def append(self, function: Callable[..., Any], *args: Any) -> None:
        """Apply a function to the call's result: ``function(*args, value)`` takes its place."""
        self._after.append((function, args))

    def replace(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)`` instead of the operator with its arguments."""
        self._final = (function, *args)

    def emit(self) -> fx.Node:
        """Write the call, as changed, and return its node."""
        if self._final is not None:
            node = self.graph.call_function(self._final[0], tuple(self._final[1:]))
        else:
            by_place = [self.arguments[name] for name in self.positional]
            by_name = {k: v for k, v in self.arguments.items() if k not in self.positional}
            node = self.graph.call_function(self.target, (*self.prefix, *by_place), by_name)
        for function, args in self._after:
            node = self.graph.call_function(function, (*args, node))
        return node


def _require_shard(placement: Placement) -> Shard:
    assert isinstance(placement, Shard)
    return placement
