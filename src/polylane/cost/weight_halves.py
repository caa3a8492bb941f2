"""Weight halves: the part of each operator's backward pass that computes gradients of weights, at a later time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polylane.graph.graph import Graph
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey, node_name, tensor_key
from polylane.placement.redistribute import collective_name, gradient_ends
from polylane.placement.rewrite import AxisSplit
from polylane.placement.weight_calls import find_graph_weight_calls, positional_arguments
from polylane.placement.weight_formulas import operand_at

# What both halves of a backward pass take longer than the whole, by kind of device. In the whole pass the gradients of
# a call's input and weight follow each other, while its kept input and the gradient of its result are in the caches of
# a CPU; in halves both go to memory and come back: so many times their bytes move at the memory's speed. The kernels of
# a GPU read them from memory either way. Measured: a GPT that keeps 26 MB for every second half (docs/results).
HALVING_TRAVERSALS = {"cpu": 2.0, "cuda": 0.0}
# The same as a part of the backward pass of these calls, where no bandwidth is known, and of other devices. On two busy
# cores 2 to 8 % were measured, by what else they shared; an order that is found for 5 % loses least over that range.
HALVING_SHARE, HALVING_SHARE_ELSEWHERE = 0.05, 0.03


class WeightHalves:
    """The calls of a sharded graph whose weight gradient may come later, in the second half of a backward pass.

    Args:
        graph: the captured graph, before any sharding.
        view: operators of its nodes as placements see them, with the inputs that each reads.
        splits: strategies and source placements by axis name; empty for an unsharded graph.
    """

    def __init__(self, graph: Graph, view: OperatorView, splits: Mapping[str, AxisSplit]) -> None:
        self._graph = graph
        self._calls = list(_deferred_calls(graph, view, splits))

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """Fraction of every node's backward pass that may run in the second half.

        A call that is linear in its input and in its weight takes as many operations for the gradient of either; where
        no gradient goes to its input, all of them are the weight's.
        """
        shares = np.zeros(len(self._graph.nodes))
        for step, key in self._calls:
            position = self._graph.positions[step.name]
            shares[position] = 0.5 if step.call.inputs[step.input_keys.index(key)].gradient else 1.0
        return shares

    def kept_bytes(self, size_of: Callable[[TensorKey], float]) -> NDArray[np.float64]:
        """Return for every node the bytes that its second half reads: a kept input, and the gradient of its result.

        Args:
            size_of: bytes of a tensor on a rank.
        """
        node_bytes = np.zeros(len(self._graph.nodes))
        for step, key in self._calls:
            node_bytes[self._graph.positions[step.name]] = size_of(key) + sum(map(size_of, step.output_keys))
        return node_bytes


def _deferred_calls(
    graph: Graph, view: OperatorView, splits: Mapping[str, AxisSplit]
) -> Iterator[tuple[OperatorNode, TensorKey]]:
    """Yield the operators whose weight gradient may come later, each with the key of the input that is kept for it."""
    operators = {step.name: step for step in view.operators}
    for node, formula in find_graph_weight_calls(graph).items():
        step = operators[node_name(node)]
        if not _sums_gradients(step, splits):
            key = tensor_key(operand_at(positional_arguments(node), formula.kept))
            yield step, view.aliases.get(key[0], key)


def _sums_gradients(step: OperatorNode, splits: Mapping[str, AxisSplit]) -> bool:
    """Return whether a parameter's gradient goes through a collective on its way: those run in the first half."""
    return any(
        key[0].startswith("parameter:") and collective_name(*gradient_ends(split.placement(key), needed))
        for split in splits.values()
        for key, needed in zip(step.input_keys, split.strategies[step.name].inputs, strict=True)
    )
