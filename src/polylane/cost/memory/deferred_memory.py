"""Deferred memory: what a backward pass in two halves keeps from its first half to its second.

For every call whose weight gradient is computed later: its input, and the gradient of its result; memory that several
of them share counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np
from torch import fx

from polylane.cost.memory import intervals
from polylane.cost.memory.backward_steps import StageSteps
from polylane.cost.memory.intervals import Floats, Intervals, Range
from polylane.cost.memory.saved_tensors import Key, SavedByOperator, SavedTensors
from polylane.graph.graph import Graph
from polylane.placement.weight_calls import find_graph_weight_calls, positional_arguments
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
        inputs, gradients = (np.unique(touches.in_ranges(pieces)[0]) for touches in (self.inputs, self.gradients))
        own_bytes = intervals.slice_ranges(self.own, pieces).sum()
        kept_bytes = float(sizes[inputs].sum() + gradient_sizes[gradients].sum() + own_bytes)
        return kept_bytes, float(intervals.slice_ranges(self.weights, pieces).max(initial=0.0))

    def bytes_kept_longer(
        self, pieces: Sequence[Range], saved: Mapping[int, int], sizes: Floats, steps: StageSteps
    ) -> Floats:
        """Return the bytes alive at each moment of a first half that are kept for the second, and not needed there.

        Args:
            pieces: ranges of nodes of the stage.
            saved: saved pieces that the stage makes -> first node that saves them, after which a whole pass frees them.
            sizes: bytes of all pieces of values.
            steps: moments of the stage's first half.
        """
        inputs = np.array([i for i in np.unique(self.inputs.in_ranges(pieces)[0]) if i in saved], dtype=np.int64)
        nodes = np.array([saved[i] for i in inputs], dtype=np.int64)
        own_bytes = intervals.slice_ranges(self.own, pieces)
        kept_bytes = steps.alive_after(nodes, sizes[inputs]) + steps.alive_after(np.arange(len(own_bytes)), own_bytes)
        return kept_bytes + steps.gradients_kept(np.unique(self.gradients.in_ranges(pieces)[0]))


@dataclass(frozen=True)
class WaitingCall:
    """A call whose weight gradient is computed later.

    Attributes:
        name: name under which the operator's saved tensors are recorded.
        saved: tensors that it reads, makes and saves.
        formula: how the gradients of its weight and bias follow from what it keeps.
        kept: key of the input that is kept; None if it reads no tensor.
        later: keys of the weight, and of the bias if its gradient is computed later too.
    """

    name: str
    saved: SavedByOperator
    formula: WeightFormula
    kept: Key | None
    later: frozenset[Key]


def find_deferred_calls(graph: Graph, keeping: SavedTensors) -> list[WaitingCall]:
    """Find the calls of a graph whose weight gradients are computed later.

    Args:
        graph: the captured graph, unsharded, as one device runs it.
        keeping: what operators save on one rank.
    """
    waiting_calls = list[WaitingCall]()
    for node, formula in find_graph_weight_calls(graph).items():
        name = str(node.meta["name"])
        saved = keeping.nodes.get(name)
        if saved is None:
            continue
        arguments = positional_arguments(node)
        kept_key = _key_of(operand_at(arguments, formula.kept))
        late = (_key_of(operand_at(arguments, at)) for at in (formula.weight, formula.bias) if at is not None)
        # Some keys are others in the rank's own code: then the first input is kept, and parameters get gradients later.
        is_read = kept_key in saved.input_keys
        later = frozenset(late) & set(saved.input_keys)
        later = later or frozenset(key for key in saved.input_keys if keeping.forms[key].is_parameter)
        waiting_calls.append(
            WaitingCall(name, saved, formula, kept_key if is_read else next(iter(saved.input_keys), None), later)
        )
    return waiting_calls


def find_deferred_memory(
    graph: Graph,
    calls: Sequence[WaitingCall],
    keeping: SavedTensors,
    piece_of: Callable[[Key], int | None],
    result_gradients: Mapping[int, Sequence[int]],
) -> DeferredMemory:
    """Find what every call keeps whose weight gradient is computed later.

    Args:
        graph: the captured graph, unsharded, as one device runs it.
        calls: its calls whose weight gradients are computed later.
        keeping: what operators save on one rank.
        piece_of: piece of memory of a tensor; None for parameters and for the batch, which are held anyway.
        result_gradients: by node the gradient pieces of its results, in the first half of a backward pass.
    """
    inputs, gradients = ([list[int]() for _ in graph.nodes] for _ in range(2))
    own_bytes, weights = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes))
    for call in calls:
        saved, key = call.saved, call.kept
        if saved.at not in result_gradients:  # no gradient arrives
            continue
        if key is not None and call.formula.is_product and saved.trial.is_known and key not in saved.keys:
            own_bytes[saved.at] = _cast_bytes(key, saved, keeping)  # autograd, too, saves a cast of it
        elif key is not None and (piece := piece_of(key)) is not None:
            inputs[saved.at].append(piece)
        gradients[saved.at] += result_gradients[saved.at]
        weights[saved.at] = sum(keeping.forms[k].bytes for k in call.later)
    return DeferredMemory(Intervals.from_nodes(inputs), Intervals.from_nodes(gradients), own_bytes, weights)


def _key_of(operand: fx.Node) -> Key:
    """Return the key of a call's operand in the unsharded code."""
    if operand.op == "placeholder":
        kind, name = operand.meta["role"]
        return f"{kind}:{name}", 0
    if operand.target is getitem:
        return str(operand.args[0].meta["name"]), int(operand.args[1])  # type: ignore
    return str(operand.meta["name"]), 0


def _cast_bytes(key: Key, saved: SavedByOperator, keeping: SavedTensors) -> int:
    form, result = keeping.forms[key], keeping.forms[saved.output_keys[0]]
    return form.bytes // form.dtype.itemsize * result.dtype.itemsize
