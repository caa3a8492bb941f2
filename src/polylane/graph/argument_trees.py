"""Argument trees: a call's arguments and results as flat leaves, objects of the user's own classes among them.

torch's pytrees know lists, tuples and dicts. A batch or a result that is a dataclass, a mapping of another class or an
object with tensors as attributes is taken apart as these are, so that no tensor hides in a leaf: its class is
registered when the first such object is met.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten

from polylane.errors import PolylaneError
from polylane.graph.batch import batch_structure, find_children


@dataclass(frozen=True)
class _Assembly:
    """How an object is put together again; equal for objects with the same names."""

    names: Any
    build: Callable[[list[Any]], Any] = field(compare=False)


def flatten_tree(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a value, and how they are nested; no leaf is an object that holds tensors."""
    leaves, spec = tree_flatten(value)
    kinds = {type(leaf) for leaf in leaves if _hides_tensors(leaf)}
    if not kinds:
        return leaves, spec
    for kind in kinds:
        register_pytree_node(kind, _take_apart, _put_together)
    return flatten_tree(value)


def refuse_changed(leaves: Sequence[Any], arguments: Any, line: str) -> None:
    """Refuse a model that puts other values into the dict, list or object that it is called with.

    Args:
        leaves: the flat arguments before the call.
        arguments: the arguments after it.
        line: file and line of the call.
    """
    leaves_afterwards, _ = flatten_tree(arguments)
    is_same = len(leaves) == len(leaves_afterwards)
    if not is_same or any(a is not b for a, b in zip(leaves, leaves_afterwards, strict=True)):
        raise PolylaneError(
            f"the model changes a dict, list or object that it is called with ({line}), which the script would not "
            "see: have it return what it adds"
        )


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, (Tensor, nn.Module, type)) or not hasattr(leaf, "__dict__"):
        return False
    values, _ = _take_apart(leaf)
    return any(isinstance(value, Tensor) or _holds_tensors(value) for value in values)


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in values)


def _take_apart(value: Any) -> tuple[list[Any], _Assembly]:
    children = find_children(value)
    if children is not None:
        return children[0], _Assembly(batch_structure(value), children[1])
    names = tuple(vars(value))

    def build(parts: list[Any]) -> Any:
        clone = copy.copy(value)
        vars(clone).update(zip(names, parts, strict=True))
        return clone

    return list(vars(value).values()), _Assembly(names, build)


def _put_together(parts: Any, assembly: Any) -> Any:
    return assembly.build(list(parts))
