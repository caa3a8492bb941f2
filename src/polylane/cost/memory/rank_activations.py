"""What one rank keeps where operators are split: its own code, gone through as it runs it, collectives included."""

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
    """What every operator keeps on one rank.

    Args:
        graph: what is split.
        setting: for which; its samples are those that the splits are for.
        calls, splits, aliases: how (:meth:`polylane.sharding.layout.Layout.at`, and its view's aliases).
        coordinates: the rank's index on each axis; default: the first rank, which has the largest parts.
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
        """Of the operator of the whole graph that a node is written for; results are moved at the end."""
        written_for = whole[node.meta["turn"]]
        return graph.positions[written_for.meta["name"]] if written_for.op == "call_function" else len(graph.nodes) - 1

    return SavedTensorTrace(local, setting, placeholder, lambda node: node.name, position).keeping()


def _local_form(form: TensorForm, key: TensorKey, splits: Mapping[str, AxisSplit], at: Mapping[str, int]) -> TensorForm:
    """What a rank has of a whole tensor, in memory of its own."""
    shape = form.shape
    for axis, split in splits.items():
        shape = local_shape(shape, split.placement(key), at[axis])
    if shape == form.shape:
        return form
    return dataclasses.replace(form, shape=shape, stride=torch.empty(shape, device="meta").stride())


class _SingleRankAxis:
    """One rank of an axis without the others: it gives itself as much memory as they would make it take."""

    def __init__(self, name: str, index: int, degree: int) -> None:
        self.name, self.index, self.degree = name, index, degree

    def __repr__(self) -> str:
        return f"{self.name}[{self.index}/{self.degree}]"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """The sum over all ranks, to be waited for."""
        return lambda: self.all_reduce(tensor)

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over all ranks."""
        return torch.maximum(tensor, tensor)

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """What each rank has for this one."""
        own = pieces[self.index]
        assert own is not None
        return [
            own if i == self.index else None if shape is None else own.new_empty(tuple(shape))
            for i, shape in enumerate(shapes)
        ]

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        """What each rank has for this one, to be waited for."""
        found = self.exchange(pieces, shapes)
        return lambda: found
