"""Sized values: nested values and callables in which traced sizes stand, to be had at any sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from polylane.graph.traced_sizes import TracedSize, value_of


class SizedValue:
    """A value with formulas in it.

    Args:
        value: nested containers, callables and objects of this package, with traced sizes anywhere in them.

    Attributes:
        sizes: the traced sizes in the value, each once.
    """

    def __init__(self, value: Any) -> None:
        sizes: dict[int, TracedSize] = {}

        def note(size: TracedSize) -> TracedSize:
            sizes.setdefault(id(size), size)
            return size

        rebuild(note, value)
        self.value, self.sizes = value, tuple(sizes.values())
        self._numbers = self.sizes[0].trace.compile_values(self.sizes) if self.sizes else None

    def at(self, sizes: tuple[int, ...]) -> Any:
        """Return the value at given sizes; what has no formula in it is shared."""
        if self._numbers is None:
            return self.value
        numbers = {size.name: number for size, number in zip(self.sizes, self._numbers(*sizes), strict=True)}
        return rebuild(lambda size: numbers[size.name], self.value)


def as_traced(value: Any) -> Any:
    """Return a value with the numbers with which its traced sizes were decided."""
    return rebuild(value_of, value)


def rebuild(replace: Callable[[TracedSize], Any], value: Any) -> Any:
    """Return a value with its traced sizes replaced; what has none in it is returned as it is."""
    return _Rebuilding(replace).rebuild(value)


class _Rebuilding:
    """One pass through a value, which looks at each object once."""

    def __init__(self, replace: Callable[[TracedSize], Any]) -> None:
        self._replace = replace
        self._known: dict[int, Any] = {}  # by identity; an object that is being looked at stands for itself
        self._alive: list[Any] = []  # keeps identities from being used again

    def rebuild(self, value: Any) -> Any:
        if isinstance(value, TracedSize):
            return self._replace(value)
        if isinstance(value, (int, float, str, bytes, type)) or value is None:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value
            self._alive.append(value)
            self._known[id(value)] = self._rebuild_parts(value)
        return self._known[id(value)]

    def _rebuild_parts(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = [self.rebuild(part) for part in value]
            return value if _same(parts, value) else _container_like(value, parts)
        if isinstance(value, dict):
            parts = [self.rebuild(part) for part in value.values()]
            return value if _same(parts, value.values()) else dict(zip(value, parts, strict=True))
        if isinstance(value, slice):
            parts = [self.rebuild(part) for part in (value.start, value.stop, value.step)]
            return value if _same(parts, (value.start, value.stop, value.step)) else slice(*parts)
        if isinstance(value, partial):
            function, args, kwargs = (self.rebuild(part) for part in (value.func, value.args, value.keywords))
            is_same = function is value.func and args is value.args and kwargs is value.keywords
            return value if is_same else partial(function, *args, **kwargs)
        if isinstance(value, MethodType):
            owner = self.rebuild(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, FunctionType):
            return self._rebuild_function(value)
        return self._rebuild_object(value)

    def _rebuild_function(self, function: FunctionType) -> FunctionType:
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        old_parts = (cells, function.__defaults__, function.__kwdefaults__)
        parts = [self.rebuild(part) for part in old_parts]
        if _same(parts, old_parts):
            return function
        closure = tuple(CellType(*contents) for contents in parts[0])
        new_function = FunctionType(function.__code__, function.__globals__, function.__name__, parts[1], closure)
        new_function.__kwdefaults__, new_function.__module__ = parts[2], function.__module__
        return new_function

    def _rebuild_object(self, value: Any) -> Any:
        """Rebuild an object of this package; of others (tensors, modules, torch's operators) no sizes are a part."""
        attributes = getattr(value, "__dict__", None)
        if not type(value).__module__.startswith("polylane") or not attributes:
            return value
        parts = {name: self.rebuild(attribute) for name, attribute in attributes.items()}
        if _same(parts.values(), attributes.values()):
            return value
        new_object = copy.copy(value)
        new_object.__dict__.update(parts)
        return new_object


def _contents(cell: CellType) -> tuple[Any, ...]:
    """Return what a function's cell holds, as the arguments of another one: nothing, where it is empty."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _same(parts: Any, old_parts: Any) -> bool:
    return all(a is b for a, b in zip(parts, old_parts, strict=True))


def _container_like(value: Any, parts: list[Any]) -> Any:
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
