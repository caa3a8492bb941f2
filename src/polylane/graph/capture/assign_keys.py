"""Keys of random operators: every random operator of a graph gets a salt, so that its numbers depend on no rank."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.capture.leaves import LeafCall
from polylane.graph.capture.python.drawn_functions import DrawnFunction, KeyedDraw
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.nodes.facts import UnderSetting, functional_name, op_name, unwrap_settings
from polylane.graph.nodes.names import source_of
from polylane.graph.nodes.user_lines import format_line
from polylane.graph.operators.counter_rng import python_seed_of, salt_of, seed_of
from polylane.graph.operators.functionalize import complete_arguments
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.packed_recurrent import PackedRecurrent
from polylane.graph.operators.python_context import running_as_slice
from polylane.graph.python_state.random_generators import python_seeded
from polylane.graph.symbolic_sizes import batch_dimension, is_ragged


class PythonOnSlice:
    """The user's own Python on a sample slice: keyed random numbers where shapes show samples, shared statistics.

    Python's and numpy's generators are seeded with a number that is equal on all workers.

    Args:
        target: the leaf or function, possibly under settings.
        name: the node's user-facing name, from which its salt is derived.
    """

    __module__ = "polylane"

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name, self.salt = target, name, salt_of(name)
        self.__name__ = target.__name__

    @property
    def own(self) -> Any:
        """The leaf or function itself, without the settings that it runs under."""
        return unwrap_settings(self.target)

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> Any:
        call = self.own
        with python_seeded(python_seed_of(part, self.salt)):
            if call.random or call.normalizes:
                return self._keyed(part, tensors)
            return self.target(part, tensors)

    def _keyed(self, part: Any, tensors: Sequence[Tensor]) -> Any:
        devices = {t.device for t in tensors if t.device.type == "cuda"}
        with torch.random.fork_rng(devices=[device.index for device in devices]):
            torch.manual_seed(seed_of(part, self.salt))  # for random operators that have no keyed version
            with running_as_slice(part, self.name):
                return self.target(part, tensors)


def copy_python_call(target: Any) -> Any:
    """Return the user's own Python on a copy of its module, under the same settings; a stateless target unchanged.

    One module cannot run on two sets of tensors at once, and its buffers and Python state belong to its own calls.
    """
    if isinstance(target, (UnderSetting, PythonOnSlice)):
        outer = copy.copy(target)
        outer.target = copy_python_call(target.target)
        return outer
    return target.copy_call() if isinstance(target, LeafCall) else target


class KeyedInPlace:
    """A keyed operator that writes its value over its first argument."""

    __module__ = "polylane"

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.__name__ = function.__name__ + "_"

    def __call__(self, part: Any, salt: int, batch_dim: int | None, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(self.function(part, salt, batch_dim, x, *args, **kwargs))


class DrawnPerSlice:
    """A keyed operator on a value whose size depends on data: every slice draws numbers of its own."""

    __module__ = "polylane"

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.__name__ = function.__name__

    # No element corresponds to a sample, so that the slice's own position goes into the seed.
    def __call__(self, part: Any, salt: int, *args: Any, **kwargs: Any) -> Any:
        return self.function(dataclasses.replace(part, seed=seed_of(part, salt)), salt, *args, **kwargs)


def key_random_operators(graph: fx.Graph, part: fx.Node, name: Callable[[fx.Node], str]) -> tuple[bool, list[str]]:
    """Replace random operators by those with a key.

    Args:
        graph: the captured code, changed in place.
        part: the graph's placeholder of the sample slice.
        name: returns a node's user-facing name: equal in every plan, so that the numbers are equal too.

    Returns:
        Whether there was any random operator, and a sentence for each whose numbers still depend on how samples are
        divided.
    """
    notes, has_random = list[str](), False
    for node in graph.nodes:
        target = unwrap_settings(node.target)
        if isinstance(target, LeafCall) or (isinstance(target, FunctionCall) and target.random):
            node.target = PythonOnSlice(node.target, name(node))
        elif isinstance(target, DrawnFunction):
            node.target, has_random = KeyedDraw(target, name(node)), True
            if target.tensor_positions:
                source = format_line(target.source)
                notes.append(f"{name(node)} draws beside a tensor, of which a part of a batch has a part alone{source}")
    for node in [n for n in graph.nodes if n.op == "call_function" and is_random(n)]:
        has_random = True
        reason = _key_node(node, part, salt_of(name(node)))
        if reason:
            numbers = f"the random numbers of {name(node)}"
            line = format_line(source_of(node))
            notes.append(f"{numbers} may depend on how the samples are divided: {reason}{line}")
    return has_random, notes


def _key_node(node: fx.Node, part: fx.Node, salt: int) -> str:
    """Give one random node its key; return why its numbers still depend on the division of samples, or ""."""
    if isinstance(node.target, PythonOnSlice):
        return "they are drawn by the user's own Python"
    plain = op_name(node)
    if isinstance(unwrap_settings(node.target), PackedRecurrent):
        node.args = (part, salt, *node.args[2:])
        return ""
    function = KEYED.get(plain)
    if function is None and functional_name(node) in KEYED:
        function, node.args = KeyedInPlace(KEYED[functional_name(node)]), complete_arguments(node)
    if function is None or "generator" in node.kwargs:
        return "torch draws them from its own generator"
    of = node.args[0] if plain.startswith(_LIKE_THEIR_INPUT) else node
    val = of.meta.get("val") if isinstance(of, fx.Node) else None
    # Later passes (placement, demand) look for the operator that the user wrote.
    node.meta["op"] = plain
    ragged = is_ragged(val)
    node.target = DrawnPerSlice(function) if ragged else function
    node.args = (part, salt, None if ragged else batch_dimension(val), *node.args)
    return "their number depends on the data" if ragged else ""


# The random value has the first argument's shape (scores, sequences); for all others, that of their result.
_LIKE_THEIR_INPUT = ("aten.scaled_dot_product_attention.", "aten.lstm.", "aten.gru.", "aten.rnn_")


def draws_by_sample(graph: fx.Graph) -> bool:
    """Return whether all random numbers depend on the samples' positions only, however a batch is divided."""
    return not any(is_drawn_by_slice(node) for node in graph.nodes if node.op == "call_function")


def is_drawn_by_slice(node: fx.Node) -> bool:
    """Return whether an operator's random numbers are those of a slice of the batch, and not of its samples' places."""
    return isinstance(unwrap_settings(node.target), (PythonOnSlice, DrawnPerSlice)) or is_random(node)


def is_random(node: fx.Node) -> bool:
    target: Any = unwrap_settings(node.target)
    if isinstance(target, PythonOnSlice):
        target = target.own
    if isinstance(target, (LeafCall, FunctionCall)):
        return target.random
    if isinstance(target, PackedRecurrent):
        return target.draws(node.args)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    base = target._schema.name.removeprefix("aten::")
    # With dropout 0 or in evaluation nothing is drawn: the operator's arguments say so.
    if base in _PROBABILITY_AT:
        schema = [argument.name for argument in target._schema.arguments]
        arguments = {**dict(zip(schema, node.args, strict=False)), **node.kwargs}
        return all(bool(arguments.get(key, False)) for key in _PROBABILITY_AT[base])
    return base in _UNTAGGED or torch.Tag.nondeterministic_seeded in target.tags


# Arguments that must all be truthy for an operator to draw; a key "p" is its probability.
_PROBABILITY_AT = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), ("p", "train")),
    **dict.fromkeys(("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_"), ("p", "train")),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", "train")),
    **dict.fromkeys(("rrelu", "rrelu_"), ("training",)),
    "scaled_dot_product_attention": ("dropout_p",),
}
_UNTAGGED = frozenset(("multinomial", "normal_functional"))
