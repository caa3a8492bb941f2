"""Weights in the dtype of a pass (ZeRO-3 under autocast): cast before they are gathered, not after.

Autocast casts a weight in every pass, and autograd keeps the cast: gathered in float32, a unit takes twice the bytes on
its way, and its casts stay whole on every replica between the passes. FSDP2 gathers in ``param_dtype`` instead (Zhao et
al., "PyTorch FSDP", VLDB 2023, section 4.4). Here each rank casts its shard, and a stage's code reads views of what is
gathered, at the place where autocast would cast: the same numbers, and autograd's graph is the same.

    autocast    float32 unit   w ── cast ── linear        saved: the cast
    here        bfloat16 unit      ╲
                released       w ── view ── linear        saved: a position in the unit

The parameter stays in the graph, for its gradient: in the dtype of the pass as far as the view, then in its own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.memory import aliased_arguments, storage_id
from polylane.placement.overlap import hold, linear
from polylane.runtime.parameters.zero_shards import FlatBuffer, empty_storage


class CastWeight:
    """A call of a stage's code, ``cast(weight)``: a weight, or a view of one, in the dtype that its unit has now.

    Args:
        flat: the flat buffer of the weight's unit.
        name: the weight's canonical name.
        views: the nodes by which the argument is made of the weight, in order.
        restores: whether the result is in the weight's own dtype again, for a reader that is not torch's.
    """

    __module__ = "polylane"
    __name__ = "cast_weight"

    def __init__(self, flat: FlatBuffer, name: str, views: Sequence[fx.Node], restores: bool) -> None:
        self._flat, self._name, self._views, self._restores = flat, name, tuple(views), restores

    def __call__(self, weight: Tensor) -> Tensor:
        return _CastFunction.apply(weight, self)  # type: ignore[no-any-return, no-untyped-call]

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the value; what is gathered in the weight's own dtype, outside of passes, is cast now."""
        value = self._flat.full_view(self._name)
        for view in self._views:
            value = _call_on(view, value)
        if self._flat.unit.cast is not None:
            value = value.to(self._flat.unit.cast)
        return value.to(dtype) if self._restores else value


class _CastFunction(torch.autograd.Function):
    """Autocast's cast: of the gradient it makes one in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, call: CastWeight) -> Tensor:
        ctx.dtype = weight.dtype
        return call.read(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype), None


def read_cast_weight(graph: fx.Graph, weight: fx.Node, flat: FlatBuffer) -> None:
    """Have all readers of a weight in a stage's code, and of its views, read it in the dtype of the pass, in place.

    Operators that read the weight itself share one cast, as autocast keeps that of a parameter; of a view it casts
    anew for each of them, which decides in which dtype their gradients are added.

    Args:
        graph: the code, which reads the weight by casts alone.
        weight: placeholder of a parameter of a unit that is gathered in another dtype.
        flat: the flat buffer of its unit.
    """
    name = weight.meta["role"][1]
    shape = flat.parameters[flat.unit.parameters.index(name)].shape
    pending: list[tuple[fx.Node, Any, list[fx.Node]]] = [
        (weight, empty_storage(torch.empty((), device="meta"), shape), [])
    ]
    order = {node: number for number, node in enumerate(graph.nodes)}
    while pending:
        node, example, views = pending.pop()
        shared: fx.Node | None = None
        for reader in sorted(node.users, key=order.__getitem__):
            view = _take_view(reader, example)
            if view is not None:
                pending.append((reader, view, [*views, reader]))
                continue
            is_cast = _is_cast_for(reader, node)
            if shared is None or not is_cast:
                call = CastWeight(flat, name, views, not (is_cast or reader.target is hold))
                with graph.inserting_before(reader):
                    cast = graph.call_function(call, (node,))
                cast.meta = {"name": cast.name, "op": "cast_weight"}
                shared = cast if is_cast and node is weight else shared
            else:
                cast = shared
            reader.replace_input_with(node, cast)


def _is_cast_for(reader: fx.Node, weight: fx.Node) -> bool:
    """Return whether autocast casts a weight, or a view of it, for an operator that reads it.

    Not where the operator makes a view that is not a node of one input, as ``expand`` to a batch: that is cast itself,
    so the gradients of its elements are added in the weight's dtype.
    """
    is_torchs = isinstance(unwrap_settings(reader.target), torch._ops.OpOverload)
    return (is_torchs and weight not in aliased_arguments(reader)) or reader.target is linear


def _call_on(node: fx.Node, value: Any) -> Any:
    """Return what a node with one input makes of a value."""
    return node.target(*fx.map_arg(node.args, lambda _: value), **node.kwargs)  # type: ignore[operator]


def _take_view(node: fx.Node, example: Any) -> Any:
    """Return the view that a node makes of a value without data, or None if it does anything else."""
    target = unwrap_settings(node.target)
    is_pure = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    if not (is_pure or target is operator.getitem) or node.all_input_nodes != aliased_arguments(node):
        return None
    result = _call_on(node, example)
    tensors = [example, result]
    tensors = [value for item in tensors for value in (item if isinstance(item, (list, tuple)) else [item])]
    return result if len({storage_id(tensor) for tensor in tensors}) == 1 else None
