"""Reachable Python state: the names under which the user's Python keeps something outside of parameters and buffers.

A capture runs the user's Python once and freezes its state. What it may have read or changed is found by a walk over
all it can reach: attributes of modules, of their classes and of the loss; closures of functions, their defaults and
attributes; the globals that they name. Functions are followed in the user's own files only; library modules keep their
state in attributes, or in caches that settle. What can run is looked for inside of values too: a function in a table, a
method in a list, a module in a closure.

:mod:`polylane.graph.python_state.state_snapshots` detects changes of it, and restores it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polylane.graph.python_state.own_objects import (
    MISSING,
    MOST_VALUES,
    PLAIN,
    children_of,
    defaults_of,
    file_of,
    is_filled,
    is_of_project_class,
    is_own_or_installed,
    is_project_file,
    names_in_code,
)

# Attributes of a module that torch itself manages: they are restored elsewhere.
TORCHS = frozenset(("_parameters", "_buffers", "_modules", "training", "_call_impl"))
# Tables of hooks and the like, mostly empty: watched only if they contain something.
_TORCHS_TABLES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))


@dataclass(frozen=True, eq=False)
class PythonName:
    """Something that the user's Python can read and write by a name.

    Attributes:
        owner: the module, class, function, object, dict of globals, or cell that has the name.
        name: the name as code refers to it.
        label: description of the name for the user.
        kind: "attribute", "global", "variable" (of a closure), "default" or "argument" (of a partial).
        path: path of the owning module in the model, if the owner is one.
    """

    owner: Any
    name: str
    label: str
    kind: str
    path: str | None = None

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def get(self) -> Any:
        """Return the present value, or MISSING."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents if is_filled(self.owner) else MISSING
        if self.kind == "default":
            return defaults_of(self.owner).get(self.name, MISSING)
        return _listed_values(self.owner).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """Restore a value that :meth:`get` returned."""
        if isinstance(self.owner, types.CellType):
            if value is not MISSING:
                self.owner.cell_contents = value
        elif self.kind == "default":
            return  # the default is the same object; its content is restored by the snapshot
        elif isinstance(self.owner, type):
            # Some classes refuse every assignment to an attribute, such as an enumeration to its members.
            if value is vars(self.owner).get(self.name, MISSING):
                return
            if value is not MISSING:
                setattr(self.owner, self.name, value)
            elif self.name in vars(self.owner):
                delattr(self.owner, self.name)
        elif value is not MISSING:
            _listed_values(self.owner)[self.name] = value
        else:
            _listed_values(self.owner).pop(self.name, None)


def _listed_values(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def find_python_names(
    modules: Iterable[tuple[str, nn.Module]],
    roots: Iterable[Any] = (),
    ran: Collection[types.CodeType] | None = None,
    *,
    everything: bool = False,
) -> list[PythonName]:
    """Return all names that modules, and other callables, can reach.

    Args:
        modules: modules of model and loss, with their paths.
        roots: further callables, such as a loss: functions, bound methods, partials, callable objects.
        ran: code objects of the functions to follow; default: all functions.
        everything: whether to follow functions and classes of libraries too, and modules that are reached by name; for
            a root of which nothing else is known.
    """
    modules = list(modules)
    walk = _NameFinder(ran, everything, {id(module) for _, module in modules})
    for path, module in modules:
        walk.module(path, module)
    for root in roots:
        walk.callable(root)
    return walk.found


_RUNS = (types.FunctionType, staticmethod, classmethod, property, functools.partial, functools.cached_property)


class _NameFinder:
    def __init__(self, ran: Collection[types.CodeType] | None, everything: bool, module_ids: Collection[int]) -> None:
        self.found: list[PythonName] = []
        self._ran, self._inside = ran, module_ids
        self._follows = is_own_or_installed if everything else is_project_file
        self._seen: set[int] = set()
        self._keys: set[tuple[int, str]] = set()
        self._values = dict[int, Any]()  # values whose inside was looked at, by id

    # A name may be reached in several ways: keep the first label.
    def _add(self, owner: Any, name: str, label: str, kind: str, path: str | None = None) -> None:
        python_name = PythonName(owner, name, label, kind, path)
        if python_name.key not in self._keys:
            self._keys.add(python_name.key)
            self.found.append(python_name)

    def _new(self, value: Any) -> bool:
        was_seen = id(value) in self._seen
        self._seen.add(id(value))
        return not was_seen

    def module(self, path: str | None, module: nn.Module) -> None:
        """Follow a module of the model or the loss; one that only Python refers to has no path, and its mode counts."""
        if not self._new(module):
            return
        prefix = f"{type(module).__name__}." if path is None else f"{path}." if path else ""
        for name, value in list(module.__dict__.items()):
            of_torch = name in TORCHS and not (path is None and name == "training")
            if not of_torch and (name not in _TORCHS_TABLES or value):
                self._add(module, name, f"{prefix}{name}", "attribute", path)
                self._value(value)
        self._class(type(module))

    def callable(self, value: Any) -> None:
        """Follow a function, or what wraps one, and all that it can reach."""
        while isinstance(value, functools.partial):
            for name, part in value.keywords.items():
                self._add(value.keywords, name, f"the argument {name} of a partial", "argument")
                self._value(part)
            for part in value.args:
                self._object(part)
                self._value(part)
            value = value.func
        if isinstance(value, types.MethodType):
            self._object(value.__self__)
            value = value.__func__
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self.callable(part)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif value is not None:
            self._object(value)

    def _value(self, value: Any) -> None:
        """Follow what can run in a value that is reached by name, as deep inside of it as it is."""
        pending, budget = [value], MOST_VALUES
        while pending and budget:
            value, budget = pending.pop(), budget - 1
            if isinstance(value, (*_RUNS, types.MethodType, type)):
                self.callable(value)
            elif isinstance(value, nn.Module):
                if id(value) not in self._inside:
                    self._object(value)
            elif type(value) not in PLAIN and not isinstance(value, Tensor) and id(value) not in self._values:
                self._values[id(value)] = value
                if is_of_project_class(value):
                    self._class(type(value))
                pending += children_of(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                self.module(None, module)
        elif is_of_project_class(value) and self._new(value):
            for name, attribute in getattr(value, "__dict__", {}).items():
                self._add(value, name, f"{type(value).__name__}.{name}", "attribute")
                self._value(attribute)
            self._class(type(value))

    def _class(self, kind: type) -> None:
        # Base classes too: class attributes are shared state wherever they are defined.
        for base in kind.__mro__:
            is_followed = base.__module__ == "__main__" or self._follows(file_of(base))
            if not is_followed or not self._new(base):
                continue
            for name, value in list(vars(base).items()):
                if name.startswith("__") and name.endswith("__") and not callable(value):
                    continue
                if isinstance(value, _RUNS):
                    self.callable(value)
                elif not isinstance(value, (type, types.GetSetDescriptorType, types.MemberDescriptorType)):
                    self._add(base, name, f"{base.__name__}.{name}", "attribute")
                    self._value(value)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        is_followed = self._follows(code.co_filename)
        if not self._new(function):
            return
        # A decorator's wrapper, perhaps: torch puts one around the step() of every optimizer's class.
        if not is_followed or (self._ran is not None and code not in self._ran):
            if "__wrapped__" in vars(function):
                self.callable(vars(function)["__wrapped__"])
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not is_filled(cell):
                continue
            value = cell.cell_contents
            if not isinstance(value, types.ModuleType) and id(value) not in self._inside and name != "__class__":
                self._add(cell, name, f"{name} of {function.__qualname__}", "variable")
            self._value(value)
        for name, value in defaults_of(function).items():
            self._add(function, name, f"the default {name} of {function.__qualname__}", "default")
            self._value(value)
        for name, value in list(vars(function).items()):
            if name == "__wrapped__":
                self.callable(value)
            else:
                self._add(function, name, f"{function.__qualname__}.{name}", "attribute")
                self._value(value)
        # Globals are followed only if the function's code mentions them.
        named = names_in_code(code)
        for name in named & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                inner = vars(value) if is_project_file(getattr(value, "__file__", None) or "") else {}
                for inner_name in sorted(named & inner.keys()):
                    if not isinstance(inner[inner_name], types.ModuleType):
                        self._global(inner, inner_name, f"{value.__name__}.")
            else:
                self._global(function.__globals__, name, "")

    def _global(self, owner: dict[str, Any], name: str, prefix: str) -> None:
        value = owner[name]
        if id(value) not in self._inside:
            self._add(owner, name, f"the global {prefix}{name}", "global")
        self._value(value)
