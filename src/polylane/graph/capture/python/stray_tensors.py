"""Parameters that a model also keeps outside of its modules' tables: where others take their place, they do there too.

A list of the weights that a model's own regularization sums, say: ``torch.func.functional_call`` and ``torch.export``
replace what is in the tables of modules, and would leave the old tensors in the list, with gradients that get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.python_state.own_objects import (
    PLAIN,
    is_filled,
    is_of_project_class,
    is_project_file,
    names_in_code,
)

# Most values that are looked into, of the user's alone: this is done in every call of a module that stays whole.
_MOST = 100_000
_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def references_replaced(module: nn.Module, replacements: Mapping[int, Tensor]) -> Iterator[None]:
    """Context manager: replace tensors that attributes of modules refer to: in containers, closures, objects, globals.

    Args:
        module: the module in whose submodules' attributes, and in itself, is looked.
        replacements: by the id of a tensor, the one that takes its place.

    Raises:
        PolylaneError: the attributes lead to more values than are looked into.
    """
    undo: list[Callable[[], None]] = []
    visited = set[int]()
    try:
        for inner in module.modules() if replacements else ():
            for name, value in list(vars(inner).items()):
                if name not in _TABLES and not isinstance(value, nn.Module) and type(value) not in PLAIN:
                    _replace_item(vars(inner), name, replacements, undo, visited)
                    # What is past a limit could be a parameter: its gradient would get lost without a word.
                    if len(visited) > _MOST:
                        raise PolylaneError(
                            f"{type(inner).__name__}.{name} refers to more than {_MOST:,} lists, dictionaries and "
                            "objects, the most that are searched for parameters; keep such data outside of the model, "
                            "or in a tensor"
                        )
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _replace_item(
    owner: Any, key: Any, replacements: Mapping[int, Tensor], undo: list[Callable[[], None]], visited: set[int]
) -> None:
    value = owner[key]
    replaced = _replace(value, replacements, undo, visited)
    if replaced is not value:
        owner[key] = replaced
        undo.append(partial(owner.__setitem__, key, value))


def _replace(value: Any, replacements: Mapping[int, Tensor], undo: list[Callable[[], None]], visited: set[int]) -> Any:
    """Return what takes a value's place: lists, dictionaries and closures are changed themselves, tuples made anew."""
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if type(value) is tuple:
        items = tuple(_replace(inner, replacements, undo, visited) for inner in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is partial:
        items = _replace(value.args, replacements, undo, visited)
        _replace(value.keywords, replacements, undo, visited)
        called = _replace(value.func, replacements, undo, visited)
        return value if items is value.args and called is value.func else partial(called, *items, **value.keywords)
    if type(value) in PLAIN or id(value) in visited or len(visited) > _MOST or not _has_values(value):
        return value
    visited.add(id(value))
    if type(value) in (list, dict):
        for key in range(len(value)) if isinstance(value, list) else list(value):
            _replace_item(value, key, replacements, undo, visited)
    elif isinstance(value, MethodType):
        _replace(value.__self__, replacements, undo, visited)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            if is_filled(cell):
                _replace_cell(cell, replacements, undo, visited)
        for name in names_in_code(value.__code__) & value.__globals__.keys():
            if not isinstance(value.__globals__[name], ModuleType):
                _replace_item(value.__globals__, name, replacements, undo, visited)
    else:
        for name in list(vars(value)):
            _replace_item(vars(value), name, replacements, undo, visited)
    return value


def _has_values(value: Any) -> bool:
    """Return whether a value is looked into: a module's empty tables of hooks, a dozen each, are not."""
    if type(value) in (list, dict):
        return bool(value)
    if isinstance(value, FunctionType):
        return is_project_file(value.__code__.co_filename)
    if isinstance(value, MethodType):
        return True
    return is_of_project_class(value) and isinstance(getattr(value, "__dict__", None), dict)


def _replace_cell(
    cell: CellType, replacements: Mapping[int, Tensor], undo: list[Callable[[], None]], visited: set[int]
) -> None:
    value = cell.cell_contents
    replaced = _replace(value, replacements, undo, visited)
    if replaced is not value:
        cell.cell_contents = replaced
        undo.append(partial(setattr, cell, "cell_contents", value))
