"""What autograd keeps of every operator for its backward pass: seen by running each kind of them alone, not guessed.

Operators run on tensors without data (torch's FakeTensorMode), so that neither memory nor the device is needed.
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
    """What every operator of a graph keeps.

    Each kind of operator (the same operator, arguments, and shapes, strides and dtypes of what it reads) runs once. The
    user's own Python runs on a copy of its module.
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
    """The form of the whole tensor that a placeholder stands for; or what it stands for, where that is no tensor."""
    kind, name = node.meta["role"]
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return graph.code.constants[name] if kind == "constant" else val
    trains = kind == "parameter" and graph.parameters[name].trainable
    form = form_at(val, number, setting.dtype)
    return dataclasses.replace(form, gradient=trains, is_parameter=kind == "parameter")
