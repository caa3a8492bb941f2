"""Which dtypes values have under autocast: the graph run once more on tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from polylane.graph.graph import Graph
from polylane.graph.part import Part
from polylane.graph.work import shape_of


def dtypes_under_autocast(graph: Graph, device_type: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every tensor value, by node name, when the graph runs under autocast to ``dtype``.

    A node that cannot run without data (the user's own Python) keeps the dtype that capture saw.
    """
    part = Part(graph.samples, batch=graph.samples)
    values: dict[fx.Node, Any] = {}
    found: dict[str, torch.dtype] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.autocast(device_type, dtype=dtype):
        for node in graph.code.fx.nodes:
            if node.op == "placeholder":
                values[node] = part if node.meta["role"][0] == "part" else _empty(node.meta["val"], None)
            elif node.op == "call_function":
                values[node] = _run(node, values)
                if isinstance(values[node], Tensor):
                    found[node.meta["name"]] = values[node].dtype
    return found


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.meta["op"] in ("leaf", "function"):  # it might keep what has no data
        return _like(node.meta.get("val"))
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return _like(node.meta.get("val"))


def _empty(val: Any, dtype: torch.dtype | None) -> Any:
    return torch.empty(shape_of(val), dtype=dtype or val.dtype, device="cpu") if isinstance(val, Tensor) else val


def _like(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return [_like(v) for v in val]
    return _empty(val, None)
