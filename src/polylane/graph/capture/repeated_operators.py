"""Common subexpression elimination: of operators that compute the same from the same, the first computes for all.

Where a loss and what is asked for beside it call the model with the same inputs, the graph has the model's operators
twice: this leaves one forward pass for both (Aho, Lam, Sethi and Ullman, Compilers, 8.5.1: value numbering).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from polylane.graph.capture.assign_keys import is_random
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.nodes.memory import written_arguments

# Their sizes follow the data: two calls of them are no repetition for torch's symbolic sizes.
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def merge_repeated(graph: fx.Graph, shared: Collection[fx.Node]) -> None:
    """Give the readers of every repeated operator the value of its first occurrence, and erase the others.

    Args:
        graph: captured code, changed in place.
        shared: nodes that share memory which some node writes: these stay as they are.
    """
    originals = dict[Any, fx.Node]()
    for node in list(graph.nodes):
        if node.op != "call_function" or node in shared or not _is_repeatable(node):
            continue
        key = _identify(node.target), _freeze(node.args), _freeze(node.kwargs)
        original = originals.setdefault(key, node)
        if original is not node:
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether an operator computes the same whenever it has the same arguments."""
    target = node.target
    if is_random(node) or written_arguments(node):
        return False
    if isinstance(target, torch._ops.OpOverload):
        if any(tag in target.tags for tag in _TAGS):
            return False
    elif isinstance(target, LeafCall | FunctionCall):
        if getattr(target, "size_positions", ()):  # its sizes are functions, which do not compare
            return False
    elif getattr(target, "__module__", "") not in ("_operator", "math", "torch"):
        return False
    values = pytree.tree_leaves(node.meta.get("val"))
    return not any(free_unbacked_symbols(value) for value in values if isinstance(value, torch.Tensor | torch.SymInt))


def _identify(target: Any) -> Any:
    """Return what tells operators apart: each call of the user's own Python is an object of its own."""
    if isinstance(target, LeafCall):
        return id(target.module), _freeze(target.arguments), tuple(mode for _, mode in target.training)
    if isinstance(target, FunctionCall):
        return target.apply, _freeze(target.arguments)
    return target


def _freeze(argument: Any) -> Any:
    """Return an argument as a key that tells all arguments apart, 1 and True and 1.0 among them."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, list | tuple):
        return tuple(_freeze(element) for element in argument)
    if isinstance(argument, dict):
        return tuple((name, _freeze(element)) for name, element in sorted(argument.items()))
    if isinstance(argument, slice):
        return "slice", _freeze(argument.start), _freeze(argument.stop), _freeze(argument.step)
    return type(argument), repr(argument)
