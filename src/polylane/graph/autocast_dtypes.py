"""Dtypes under autocast: the graph is run once more on fake tensors, and every value's dtype is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from polylane.graph.flops import shape_of
from polylane.graph.graph import Graph
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.sample_slice import SampleSlice


def dtypes_under_autocast(graph: Graph, device_type: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor value, by node name, when the graph runs under autocast to ``dtype``.

    A node that cannot run without data (the user's own Python) keeps the dtype that capture saw.

    Args:
        graph: the captured graph, which is not changed.
        device_type: torch's name of the device that autocast is for, "cpu" or "cuda".
        dtype: the lower-precision dtype of the autocast region.
    """
    part = SampleSlice(graph.samples, batch=graph.samples)

    def bind(node: fx.Node) -> Any:
        return part if node.meta["role"][0] == "part" else _empty_as(node.meta["val"], None)

    interpreter = _DtypeInterpreter(graph.code.fx, bind)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.autocast(device_type, dtype=dtype):
        interpreter.run()
    return interpreter.dtypes


class _DtypeInterpreter(GraphInterpreter):
    """Records the dtype of every tensor; a node that cannot run without data gets the one that capture saw."""

    def __init__(self, code: fx.Graph, bind: Callable[[fx.Node], Any]) -> None:
        super().__init__(code, bind)
        self.dtypes: dict[str, torch.dtype] = {}

    def call_operator(self, node: fx.Node) -> Any:
        value = self._value(node)
        if isinstance(value, Tensor):
            self.dtypes[node.meta["name"]] = value.dtype
        return value

    def _value(self, node: fx.Node) -> Any:
        if node.meta["op"] in ("leaf", "function"):  # the user's own Python might keep fake tensors
            return _without_data(node.meta.get("val"))
        try:
            return super().call_operator(node)
        # Some operators have no fake implementation.
        except Exception:
            return _without_data(node.meta.get("val"))


def _empty_as(val: Any, dtype: torch.dtype | None) -> Any:
    return torch.empty(shape_of(val), dtype=dtype or val.dtype, device="cpu") if isinstance(val, Tensor) else val


def _without_data(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return [_without_data(v) for v in val]
    return _empty_as(val, None)
