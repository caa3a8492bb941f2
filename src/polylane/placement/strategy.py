"""Call: one operator with concrete shapes, as a rule sees it; Strategy: one way to split it; Edit: what a rank runs."""

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

# A dimension of one of a call's tensors: ("in", which input, dim) or ("out", which output, dim).
Place = tuple[str, int, int]


@dataclass(frozen=True)
class TensorValue:
    """A tensor that a call reads or gives.

    Attributes:
        shape: whole, at the number of samples in question.
        dtype: of its elements.
        gradient: whether a gradient flows back through it.
        index: its number among the call's inputs, or outputs; the same tensor read twice is two inputs.
        side: "in" or "out".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    index: int
    side: str = "in"

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def at(self, dim: int) -> Place:
        """A dimension of it, counted from either end."""
        return self.side, self.index, dim % max(self.dim, 1)


@dataclass(frozen=True)
class OperatorCall:
    """One operator of the graph.

    Attributes:
        op: "aten.linear.default"; "leaf", "function" or another name for what is no operator of torch's.
        arguments: by the name in torch's schema, defaults included; tensors as :class:`TensorValue`, sizes as numbers.
        inputs: all tensors that it reads, in the order of ``arguments``.
        outputs: the tensors that it gives.
        degree: ranks along the axis in question.
        written_inputs: numbers of the inputs that it writes in place.
        neighbour_cuts: cuts that its neighbours may have, by dimension.
        prefix: how many leading positional arguments are not torch's (the part in hand, a key).
    """

    op: str
    arguments: Mapping[str, Any]
    inputs: tuple[TensorValue, ...]
    outputs: tuple[TensorValue, ...]
    degree: int
    written_inputs: frozenset[int] = frozenset()
    neighbour_cuts: Mapping[Place, tuple[Cuts, ...]] = field(default_factory=dict)
    prefix: int = 0

    @cached_property
    def base(self) -> str:
        """The operator without its library and its overload: "linear"."""
        return self.op.split(".")[1] if self.op.startswith("aten.") else self.op

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def common_cuts(self, *places: Place) -> list[Cuts]:
        """The ways to cut a dimension that all these places have in common: even ones, and those neighbours ask for."""
        found: dict[Cuts, None] = {}
        size = self._size(places[0])
        if size > 1:
            found[even_cuts(size, self.degree)] = None
            for place in places:
                found.update(dict.fromkeys(self.neighbour_cuts.get(place, ())))
        return list(found)

    def _size(self, place: Place) -> int:
        part, index, dim = place
        return (self.inputs if part == "in" else self.outputs)[index].shape[dim]

    def strategy(
        self,
        name: str,
        inputs: Mapping[int, Placement],
        outputs: Placement | Sequence[Placement],
        default: Placement = REPLICATE_PARTIAL_GRAD,
        **more: Any,
    ) -> Strategy:
        """A strategy in which inputs that are not named (by their number) are placed like ``default``."""
        every = outputs if isinstance(outputs, (list, tuple)) else [outputs] * len(self.outputs)
        placed = [_without_partial_gradient(inputs.get(v.index, default), v) for v in self.inputs]
        return Strategy(
            name,
            tuple(placed),
            tuple(_without_partial_gradient(p, v) for p, v in zip(every, self.outputs, strict=True)),
            **more,
        )


def _without_partial_gradient(placement: Placement, value: TensorValue) -> Placement:
    """What has no gradient has no partial one either."""
    return REPLICATE if isinstance(placement, Replicate) and not value.gradient else placement


@dataclass(frozen=True)
class Strategy:
    """One way to compute an operator on the ranks of an axis.

    Attributes:
        name: in words, for people: "columns", "rows", "heads", "replicate".
        inputs: how every input must lie.
        outputs: how every output then lies.
        local: what must change in the call that each rank makes; None where the operator runs as it is on its parts.
        work: the share of the operator's work that the busiest rank does; None: 1/degree where anything is sharded.
        sent: bytes that each rank sends inside the operator, forward and backward together (halos, rings).
        messages: how often it does so.
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
        """The share of the work that the busiest rank does."""
        if self.work is not None:
            return self.work
        return max((p.largest_share for p in (*self.inputs, *self.outputs) if isinstance(p, Shard)), default=1.0)


class RankCall:
    """The call that one rank makes, while the strategies of all axes change it one after another.

    Attributes:
        call: the whole call.
        index: this rank on the axis in question.
        axis: the axis as a value of the graph: the first argument of what communicates.
        arguments: by the name in torch's schema, of the local call: values of the graph where the whole call has
            tensors. Change them freely.
        target: what is called; see :meth:`replace`.
        strategy: the one in question.
    """

    def __init__(
        self,
        call: OperatorCall,
        graph: fx.Graph,
        target: Any,
        prefix: Sequence[Any],
        arguments: dict[str, Any],
        positional: Sequence[str],
        given: Sequence[Mapping[str, Placement]],
        coordinates: Mapping[str, int],
    ) -> None:
        """
        Args:
            given: of every output: its placement on each axis.
            coordinates: this rank's index on each axis.
        """
        self.call, self.graph = call, graph
        self.target, self.prefix, self.arguments, self._positional = target, list(prefix), arguments, positional
        self._given, self._coordinates = given, coordinates
        self._final: tuple[Any, ...] | None = None
        self._after: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.index = 0
        self.axis: fx.Node | None = None
        self.strategy: Strategy | None = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape that this rank has of an output, with the splits of all axes."""
        return self._local(self.call.outputs[index].shape, self._given[index])

    def _local(self, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> tuple[int, ...]:
        for axis, placement in placements.items():
            shape = local_shape(shape, placement, self._coordinates[axis])
        return shape

    def insert(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A computation before the call; its value may take the place of an argument."""
        return self.graph.call_function(function, args)

    def append(self, function: Callable[..., Any], *args: Any) -> None:
        """A computation on what the call gives: ``function(*args, value)`` takes its place."""
        self._after.append((function, args))

    def replace(self, function: Callable[..., Any], *args: Any) -> None:
        """Call something else: ``function(*args)``, instead of the operator with its arguments."""
        self._final = (function, *args)

    def emit(self) -> fx.Node:
        """The call, as changed, as a node of the graph."""
        if self._final is not None:
            node = self.graph.call_function(self._final[0], tuple(self._final[1:]))
        else:
            by_place = [self.arguments[name] for name in self._positional]
            by_name = {k: v for k, v in self.arguments.items() if k not in self._positional}
            node = self.graph.call_function(self.target, (*self.prefix, *by_place), by_name)
        for function, args in self._after:
            node = self.graph.call_function(function, (*args, node))
        return node
