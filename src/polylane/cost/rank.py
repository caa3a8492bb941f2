"""What one rank keeps where operators are split: its own code, gone through as it runs it, collectives included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.graph import Graph
from polylane.graph.keeping import Keeping, Setting
from polylane.graph.saved import placeholder_form
from polylane.graph.sizes import Numbers
from polylane.graph.trial import Form
from polylane.graph.walk import Walk
from polylane.placement.call import Call
from polylane.placement.placement import local_shape
from polylane.placement.rewrite import Split, rewrite
from polylane.placement.view import Key, key_of


def saved_on_rank(
    graph: Graph,
    setting: Setting,
    calls: Mapping[str, Call],
    splits: Mapping[str, Split],
    coordinates: Mapping[str, int] | None = None,
    aliases: Mapping[str, Key] | None = None,
) -> Keeping:
    """What every operator keeps on one rank.

    Args:
        graph: what is split.
        setting: for which; its samples are those that the splits are for.
        calls, splits, aliases: how (:meth:`polylane.planner.layout.Layout.at`, and its view's aliases).
        coordinates: the rank's index on each axis; default: the first rank, which has the largest parts.
    """
    at = dict.fromkeys(splits, 0) if coordinates is None else dict(coordinates)
    whole = list(graph.code.fx.nodes)
    local = rewrite(graph.code.fx, calls, splits, setting.samples, at, aliases)
    number = Numbers(setting.samples)

    def placeholder(node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        if kind == "axis":
            return _Lone(name, at[name], splits[name].degree)
        form = placeholder_form(graph, node, number, setting)
        return _part(form, key_of(node), splits, at) if isinstance(form, Form) else form

    def position(node: fx.Node) -> int:
        """Of the operator of the whole graph that a node is written for; results are moved at the end."""
        written_for = whole[node.meta["turn"]]
        return graph.positions[written_for.meta["name"]] if written_for.op == "call_function" else len(graph.nodes) - 1

    return Walk(local, setting, placeholder, lambda node: node.name, position).keeping()


def _part(form: Form, key: Key, splits: Mapping[str, Split], at: Mapping[str, int]) -> Form:
    """What a rank has of a whole tensor, in memory of its own."""
    shape = form.shape
    for axis, split in splits.items():
        shape = local_shape(shape, split.placement(key), at[axis])
    if shape == form.shape:
        return form
    return dataclasses.replace(form, shape=shape, stride=torch.empty(shape, device="meta").stride())


class _Lone:
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
