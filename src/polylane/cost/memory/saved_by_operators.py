"""Saved tensors of an unsharded graph: what autograd saves for every operator, found by running each kind once.

Operators run on fake tensors (torch's FakeTensorMode), so that neither memory nor the device is needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, fx

from polylane.cost.memory.operator_trial import TensorForm
from polylane.cost.memory.saved_tensor_trace import SavedTensorTrace, form_at
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.graph.graph import Graph
from polylane.graph.symbolic_sizes import ConcreteSizes


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
    form = form_at(val, number, setting.dtype)
    return dataclasses.replace(form, gradient=trains, is_parameter=kind == "parameter")
