"""Weight halves: the part of each operator's backward pass that computes gradients of weights, at a later time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import fx

from polylane.graph.graph import Graph
from polylane.placement.operator_view import OperatorNode, OperatorView, node_name, tensor_key
from polylane.placement.redistribute import collective_name, gradient_ends
from polylane.placement.rewrite import AxisSplit
from polylane.placement.weight_calls import find_weight_calls, positional_arguments
from polylane.placement.weight_formulas import operand_at


def weight_shares(graph: Graph, view: OperatorView, splits: Mapping[str, AxisSplit]) -> NDArray[np.float64]:
    """Return for every node the fraction of its backward pass that may run in the second half.

    A call that is linear in its input and in its weight takes as many operations for the gradient of either; where no
    gradient goes to its input, all of them are the weight's.

    Args:
        graph: the captured graph.
        view: its operator view.
        splits: strategies and source placements by axis name; empty for an unsharded graph.
    """
    found = np.zeros(len(graph.nodes))
    operators = {step.name: step for step in view.operators}
    _, calls = find_weight_calls(graph.code.fx, lambda name: graph.parameters[name].trainable)
    for node, formula in calls.items():
        step = operators[node_name(node)]
        kept = operand_at(positional_arguments(node), formula.kept)
        if not _sums_gradients(step, splits):
            found[graph.positions[step.name]] = 0.5 if _has_gradient(kept, step, view) else 1.0
    return found


def _has_gradient(kept: fx.Node, step: OperatorNode, view: OperatorView) -> bool:
    key = tensor_key(kept)
    key = view.aliases.get(key[0], key)
    return step.call.inputs[step.input_keys.index(key)].gradient


def _sums_gradients(step: OperatorNode, splits: Mapping[str, AxisSplit]) -> bool:
    """Return whether a parameter's gradient goes through a collective on its way: those run in the first half."""
    return any(
        key[0].startswith("parameter:") and collective_name(*gradient_ends(split.placement(key), needed))
        for split in splits.values()
        for key, needed in zip(step.input_keys, split.strategies[step.name].inputs, strict=True)
    )
