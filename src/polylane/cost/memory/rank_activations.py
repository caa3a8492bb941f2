"""Saved tensors of one rank of a sharded graph: its own rewritten code is traced, collectives included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_by_operators import placeholder_form
from polylane.cost.memory.saved_tensor_trace import SavedTensorTrace
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.graph.graph import Graph
from polylane.graph.symbolic_sizes import ConcreteSizes
from polylane.placement.operator_view import TensorKey, tensor_key
from polylane.placement.placement import local_shape
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.strategy import OperatorCall


def saved_on_rank(
    graph: Graph,
    setting: BackendSetting,
    calls: Mapping[str, OperatorCall],
    splits: Mapping[str, AxisSplit],
    coordinates: Mapping[str, int] | None = None,
    aliases: Mapping[str, TensorKey] | None = None,
) -> SavedTensors:
    """Return what every operator saves on one rank.

    Args:
        graph: the unsharded captured graph.
        setting: backend and dtypes; its samples are those for which the splits were made.
        calls, splits, aliases: sharding of the operators, from :meth:`polylane.sharding.layout.Layout.at` and its view.
        coordinates: the rank's index on each axis; default: the first rank, which has the largest shards.
    """
    at = dict.fromkeys(splits, 0) if coordinates is None else dict(coordinates)
    whole = list(graph.code.fx.nodes)
    local = rewrite(graph.code.fx, calls, splits, setting.samples, at, aliases)
    number = ConcreteSizes(setting.samples)

    def placeholder(node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        if kind == "axis":
            return _SingleRankAxis(name, at[name], splits[name].degree)
        form = placeholder_form(graph, node, number, setting)
        return _local_form(form, tensor_key(node), splits, at) if isinstance(form, TensorForm) else form

    def position(node: fx.Node) -> int:
        """Return the position of the unsharded operator for which a node was written; results move at the end."""
        # The rewrite notes in "turn" which node of the unsharded code an operator or collective came from.
        written_for = whole[node.meta["turn"]]
        return graph.positions[written_for.meta["name"]] if written_for.op == "call_function" else len(graph.nodes) - 1

    return SavedTensorTrace(local, setting, placeholder, lambda node: node.name, position).keeping()


def _local_form(form: TensorForm, key: TensorKey, splits: Mapping[str, AxisSplit], at: Mapping[str, int]) -> TensorForm:
    """Return the form of a rank's shard of a tensor, contiguous in memory of its own."""
    shape = form.shape
    for axis, split in splits.items():
        shape = local_shape(shape, split.placement(key), at[axis])
    if shape == form.shape:
        return form
    return dataclasses.replace(form, shape=shape, stride=torch.empty(shape, device="meta").stride())


class _SingleRankAxis:
    """Axis with a single simulated rank: its collectives allocate what the real ones would, without communication."""

    def __init__(self, name: str, index: int, degree: int) -> None:
        self.name, self.index, self.degree = name, index, degree

    def __repr__(self) -> str:
        return f"{self.name}[{self.index}/{self.degree}]"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return memory for the sum over all ranks."""
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a wait function for the sum over all ranks."""
        return lambda: self.all_reduce(tensor)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return memory for the elementwise maximum over all ranks."""
        return torch.maximum(tensor, tensor)

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """Return memory for the tensors that each rank sends to this one."""
        own = pieces[self.index]
        assert own is not None
        return [
            own if i == self.index else None if shape is None else own.new_empty(tuple(shape))
            for i, shape in enumerate(shapes)
        ]

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        """Return a wait function for the tensors that each rank sends to this one."""
        found = self.exchange(pieces, shapes)
        return lambda: found
