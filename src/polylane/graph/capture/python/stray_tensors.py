"""Parameters that a model also keeps outside of its modules' tables: where others take their place, they do there too.

A list of the weights that a model's own regularization sums, say: ``torch.func.functional_call`` and ``torch.export``
replace what is in the tables of modules, and would leave the old tensors in the list, with gradients that get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def references_replaced(module: nn.Module, replacements: Mapping[int, Tensor]) -> Iterator[None]:
    """Context manager: replace tensors in lists, tuples and dictionaries among the attributes of modules.

    Args:
        module: the module in whose submodules' attributes, and in itself, is looked.
        replacements: by the id of a tensor, the one that takes its place.
    """
    undo: list[Callable[[], None]] = []
    try:
        for inner in module.modules() if replacements else ():
            for name, value in list(vars(inner).items()):
                if name not in _TABLES and isinstance(value, (Tensor, list, tuple, dict)):
                    _replace_item(vars(inner), name, replacements, undo)
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _replace_item(owner: Any, key: Any, replacements: Mapping[int, Tensor], undo: list[Callable[[], None]]) -> None:
    value = owner[key]
    replaced = _replace(value, replacements, undo)
    if replaced is not value:
        owner[key] = replaced
        undo.append(partial(owner.__setitem__, key, value))


def _replace(value: Any, replacements: Mapping[int, Tensor], undo: list[Callable[[], None]]) -> Any:
    """Return what takes a value's place: lists and dictionaries are changed themselves, tuples made anew."""
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if type(value) is tuple:
        made = tuple(_replace(inner, replacements, undo) for inner in value)
        return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
    if type(value) in (list, dict):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            _replace_item(value, key, replacements, undo)
    return value
