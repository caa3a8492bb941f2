"""Side effects of the user's own code: what it may change in Python is put back, and told.

Code that is called only to be traced must leave nothing behind: no counter, no list, no random number. What a custom
autograd function may change is what its code names: attributes of its class, globals, what it closes over, and what
those hold, through the functions that it calls.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

_MISSING = object()


@dataclass(frozen=True)
class _Held:
    """A value that code may read or change, and where it is from.

    Attributes:
        get, put: what is there now, and how to put something there.
        value: what was there.
        content: of a list, set, dictionary or object: what it held.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    value: Any
    content: Any

    def changed(self) -> bool:
        """Whether it is another value, or holds something else; if so it is put back."""
        other = self.get() is not self.value
        if other:
            self.put(self.value)
        inside = _held_by(self.value)
        if inside is None or _same(inside, self.content):
            return other
        inside.clear()
        (inside.extend if isinstance(inside, list) else inside.update)(self.content)
        return True


@contextmanager
def untouched(apply: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Inside, a custom autograd function may be called: random numbers and what its code may change are put back.

    Args:
        apply: the function's own ``apply``.

    Yields:
        Says afterwards whether any of it was changed.
    """
    changed = False
    python, numpy, held = random.getstate(), np.random.get_state(), list(_reached(apply))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = torch.get_rng_state()
        try:
            yield lambda: changed
        finally:
            changed = not torch.equal(before, torch.get_rng_state()) or random.getstate() != python
            changed |= repr(np.random.get_state()) != repr(numpy)
            random.setstate(python)
            np.random.set_state(numpy)
            changed |= sum(each.changed() for each in held) > 0  # every one is put back


def _reached(apply: Callable[..., Any]) -> Iterator[_Held]:
    """All that a function's code names, through the functions and classes of the user's that it names."""
    left: list[Any] = [getattr(apply, "__self__", apply)]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for held in _of_class(each) if isinstance(each, type) else _of_code(each):
            inner = _unwrapped(held.value)
            if _is_code(inner):
                left.append(inner)
            if not isinstance(inner, (ModuleType, FunctionType, torch.Tensor)):
                yield held


def _unwrapped(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _is_code(value: Any) -> bool:
    """Whether a value is a function or class of the user's."""
    own = not str(getattr(value, "__module__", "")).startswith(("torch.", "numpy", "builtins", "polylane."))
    decorated = isinstance(value, FunctionType) and hasattr(value, "__wrapped__")
    return isinstance(value, (FunctionType, type)) and (own or decorated)


def _of_class(owner: type) -> Iterator[_Held]:
    for name, value in list(vars(owner).items()):
        if not (name.startswith("__") and name.endswith("__")):
            yield _held(
                lambda name=name: vars(owner).get(name, _MISSING),  # type: ignore[misc]
                lambda value, name=name: setattr(owner, name, value),  # type: ignore[misc]
                value,
            )


def _of_code(code: FunctionType) -> Iterator[_Held]:
    names = code.__globals__
    for name in code.__code__.co_names:
        if name in names:
            yield _held(
                lambda name=name: names.get(name, _MISSING),  # type: ignore[misc]
                lambda value, name=name: names.__setitem__(name, value),  # type: ignore[misc]
                names[name],
            )
    for cell in code.__closure__ or ():
        if (value := _content(cell)) is not _MISSING:
            yield _held(lambda cell=cell: _content(cell), lambda value, cell=cell: _fill(cell, value), value)  # type: ignore[misc]
    if (wrapped := getattr(code, "__wrapped__", None)) is not None:
        yield _held(lambda: wrapped, lambda value: None, wrapped)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _fill(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _held(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> _Held:
    inside = _held_by(value)
    return _Held(get, put, value, None if inside is None else inside.copy())


def _held_by(value: Any) -> Any:
    """The list, set or dictionary that a value is, or keeps its attributes in."""
    if type(value) in (list, set, dict):
        return value
    if isinstance(value, (type, ModuleType, FunctionType)) or type(value).__module__.startswith("torch"):
        return None  # torch's own objects remember what was looked up
    return getattr(value, "__dict__", None)


def _same(inside: Any, content: Any) -> bool:
    """Whether a container holds the very same things."""
    if len(inside) != len(content):
        return False
    if isinstance(inside, dict):
        return all(key in inside and inside[key] is value for key, value in content.items())
    pairs = zip(inside, content, strict=True) if isinstance(inside, list) else ()
    return all(a is b for a, b in pairs) and (isinstance(inside, list) or bool(inside == content))
