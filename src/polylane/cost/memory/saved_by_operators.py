"""Saved tensors of a graph, or of one of its ranks: what every operator saves, found by running each kind once.

Operators run on fake tensors (torch's FakeTensorMode), so that neither memory nor the device is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_tensor_trace import SavedTensorTrace, form_at
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.graph.graph import Graph
from polylane.graph.operators.autocast_reads import find_weight_reads
from polylane.graph.symbolic_sizes import ConcreteSizes
from polylane.placement.operator_view import TensorKey, tensor_key
from polylane.placement.placement import local_shape
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.strategy import OperatorCall


def trace_saved_tensors(graph: Graph, setting: BackendSetting) -> SavedTensors:
    """Return what every operator of a graph saves for backward.

    Each kind of operator (same operator, arguments, and shapes, strides and dtypes of its inputs) runs once. The user's
    own Python runs on a copy of its module.
    """
    number = ConcreteSizes(setting.samples)
    walk = SavedTensorTrace(
        graph.code.fx,
        setting,
        lambda node: placeholder_form(graph, node, number, setting),
        lambda node: str(node.meta["name"]),
        lambda node: graph.positions[node.meta["name"]],
    )
    return walk.keeping()


def placeholder_form(graph: Graph, node: fx.Node, number: ConcreteSizes, setting: BackendSetting) -> TensorForm | Any:
    """Return the form of a placeholder's unsharded tensor; or its value, if that is no tensor."""
    kind, name = node.meta["role"]
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return graph.code.constants[name] if kind == "constant" else val
    trains = kind == "parameter" and graph.parameters[name].trainable
    form, cast = form_at(val, number, setting.dtype), setting.autocast
    if setting.gathers_cast and trains and cast is not None and name in find_weight_reads(graph, cast).cast:
        form = dataclasses.replace(form, dtype=cast)
    return dataclasses.replace(form, gradient=trains, is_parameter=kind == "parameter")


def saved_on_rank(
    graph: Graph,
    setting: BackendSetting,
    calls: Mapping[str, OperatorCall],
    splits: Mapping[str, AxisSplit],
    aliases: Mapping[str, TensorKey],
) -> SavedTensors:
    """Return what every operator saves on the first rank, which has the largest shards.

    Args:
        graph: the unsharded captured graph.
        setting: backend and dtypes; its samples are those for which the splits were made.
        calls, splits, aliases: sharding of the operators, from :meth:`polylane.sharding.layout.Layout.at` and its view.
    """
    at = dict.fromkeys(splits, 0)
    unsharded_nodes = list(graph.code.fx.nodes)
    local = rewrite(graph.code.fx, calls, splits, setting.samples, at, aliases)
    number = ConcreteSizes(setting.samples)

    def placeholder(node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        if kind == "axis":
            return _FirstRankAxis(name, splits[name].degree)
        form = placeholder_form(graph, node, number, setting)
        return _local_form(form, tensor_key(node), splits) if isinstance(form, TensorForm) else form

    def position(node: fx.Node) -> int:
        """Return the position of the unsharded operator for which a node was written; results move at the end."""
        # The rewrite notes in "turn" which node of the unsharded code an operator or collective came from.
        written_for = unsharded_nodes[node.meta["turn"]]
        return graph.positions[written_for.meta["name"]] if written_for.op == "call_function" else len(graph.nodes) - 1

    return SavedTensorTrace(local, setting, placeholder, lambda node: node.name, position).keeping()


def _local_form(form: TensorForm, key: TensorKey, splits: Mapping[str, AxisSplit]) -> TensorForm:
    """Return the form of the first rank's shard of a tensor, contiguous in memory of its own."""
    shape = form.shape
    for split in splits.values():
        shape = local_shape(shape, split.placement(key), 0)
    if shape == form.shape:
        return form
    return dataclasses.replace(form, shape=shape, stride=torch.empty(shape, device="meta").stride())


class _FirstRankAxis:
    """Axis of which the first rank is simulated: its collectives allocate as real ones do, without communication."""

    def __init__(self, name: str, degree: int) -> None:
        self.name, self.index, self.degree = name, 0, degree

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
        own_piece = pieces[self.index]
        assert own_piece is not None
        return [
            own_piece if i == self.index else None if shape is None else own_piece.new_empty(tuple(shape))
            for i, shape in enumerate(shapes)
        ]

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        """Return a wait function for the tensors that each rank sends to this one."""
        tensors = self.exchange(pieces, shapes)
        return lambda: tensors
