"""Deferred memory: what a backward pass in two halves keeps from its first half to its second.

For every call whose weight gradient is computed later: its input, and the gradient of its result; memory that several
of them share counts once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from polylane.cost.memory import intervals
from polylane.cost.memory.backward_steps import StageSteps
from polylane.cost.memory.intervals import Floats, Intervals, Range
from polylane.cost.memory.saved_tensors import Key, SavedByOperator, SavedTensors
from polylane.graph.graph import Graph
from polylane.placement.weight_calls import find_weight_calls, positional_arguments
from polylane.placement.weight_formulas import WeightFormula, operand_at


@dataclass(frozen=True)
class DeferredMemory:
    """What the calls of a graph keep for the second half of a backward pass.

    Attributes:
        inputs: by node the pieces of memory of the kept inputs.
        gradients: by node the pieces of the kept gradients.
        own: by node the bytes of kept inputs that are no value of the graph, such as autocast's casts.
        weights: by node the bytes of the weight gradients that it makes in the second half.
    """

    inputs: Intervals
    gradients: Intervals
    own: Floats
    weights: Floats

    def bytes_between(self, pieces: Sequence[Range], sizes: Floats, gradient_sizes: Floats) -> tuple[float, float]:
        """Return the bytes that a stage keeps, and the most that one call of its second half makes.

        Args:
            pieces: ranges of nodes of the stage.
            sizes, gradient_sizes: bytes of all pieces of values and of gradients.
        """
        inputs, gradients = (np.unique(kept.in_ranges(pieces)[0]) for kept in (self.inputs, self.gradients))
        own = intervals.slice_ranges(self.own, pieces).sum()
        kept = float(sizes[inputs].sum() + gradient_sizes[gradients].sum() + own)
        return kept, float(intervals.slice_ranges(self.weights, pieces).max(initial=0.0))

    def bytes_kept_longer(
        self,
        pieces: Sequence[Range],
        saved: Mapping[int, int],
        sizes: Floats,
        gradient_sizes: Floats,
        steps: StageSteps,
    ) -> Floats:
        """Return the bytes alive at each moment of a first half that a whole backward pass has freed by then.

        Args:
            pieces: ranges of nodes of the stage.
            saved: saved pieces that the stage makes -> first node that saves them, after which a whole pass frees them.
            sizes, gradient_sizes: bytes of all pieces of values and of gradients.
            steps: moments of the stage's backward pass.
        """
        inputs = np.array([i for i in np.unique(self.inputs.in_ranges(pieces)[0]) if i in saved], dtype=np.int64)
        nodes = np.array([saved[i] for i in inputs], dtype=np.int64)
        touched, at = self.gradients.in_ranges(pieces)
        first, last = intervals.first_and_last(touched, at, len(gradient_sizes))
        gradients = np.flatnonzero(last >= 0)
        return steps.alive_after(nodes, sizes[inputs]) + steps.alive_after(first[gradients], gradient_sizes[gradients])


def find_deferred_memory(
    graph: Graph,
    keeping: SavedTensors,
    piece_of: Callable[[Key], int | None],
    result_gradients: Mapping[int, Sequence[int]],
) -> DeferredMemory:
    """Find what every call keeps whose weight gradient is computed later.

    Args:
        graph: the captured graph.
        keeping: what operators save on one rank.
        piece_of: piece of memory of a tensor; None for parameters and for the batch, which are held anyway.
        result_gradients: by node the gradient pieces of its results.
    """
    inputs, gradients = ([list[int]() for _ in graph.nodes] for _ in range(2))
    own, weights = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes))
    _, calls = find_weight_calls(graph.code.fx, lambda name: graph.parameters[name].trainable)
    for node, formula in calls.items():
        saved = keeping.nodes.get(node.meta["name"])
        if saved is None or saved.at not in result_gradients:  # no gradient arrives
            continue
        key = _kept_key(node, formula, saved)
        if key is not None and formula.is_product and saved.trial.is_known and key not in saved.keys:
            own[saved.at] = _cast_bytes(key, saved, keeping)  # autograd, too, saves a cast of it
        elif key is not None and (piece := piece_of(key)) is not None:
            inputs[saved.at].append(piece)
        gradients[saved.at] += result_gradients[saved.at]
        weights[saved.at] = sum(keeping.forms[k].bytes for k in saved.input_keys if keeping.forms[k].is_parameter)
    return DeferredMemory(Intervals.from_nodes(inputs), Intervals.from_nodes(gradients), own, weights)


def _kept_key(node: fx.Node, formula: WeightFormula, saved: SavedByOperator) -> Key | None:
    """Return the key of a call's kept input as the rank's own code reads it."""
    kept = operand_at(positional_arguments(node), formula.kept)
    if kept.op == "placeholder":
        kind, name = kept.meta["role"]
        key = (f"{kind}:{name}", 0)
    elif kept.target is operator.getitem:
        key = (str(kept.args[0].meta["name"]), int(kept.args[1]))
    else:
        key = (str(kept.meta["name"]), 0)
    return key if key in saved.input_keys else next(iter(saved.input_keys), None)


def _cast_bytes(key: Key, saved: SavedByOperator, keeping: SavedTensors) -> int:
    form, result = keeping.forms[key], keeping.forms[saved.output_keys[0]]
    return form.bytes // form.dtype.itemsize * result.dtype.itemsize
