"""Watched values: names that a capture's run has read, with their values then, and what of them is another now."""

from __future__ import annotations

import contextvars
import operator
import os
import stat
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.python_state.module_paths import is_inside
from polylane.graph.python_state.own_objects import (
    MISSING,
    PLAIN,
    children_of,
    is_array,
    is_of_project_class,
    is_project_file,
    names_in_code,
    read_memory,
    slots_of,
)
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.python_state.state import TORCHS, PythonName

_DEPTH = 8  # nesting of objects and containers that is followed, as deep as configurations are
_MANY = 4_000  # limit on the number of watched objects
_CONTAINERS = (list, tuple, set, frozenset, deque)
_READ = (contextvars.ContextVar, weakref.ReferenceType, types.MappingProxyType)  # whose content is read in every step
_TABLES = frozenset(nn.Module().__dict__)  # of hooks and the like, which are never replaced
# With these a function may read any attribute by a computed name: then all names are watched.
_DYNAMIC = frozenset(("getattr", "__dict__", "vars", "__getattr__", "__getattribute__"))


@dataclass(frozen=True)
class _WatchedNames:
    """Names of one dict and their values, read in one call."""

    owner: Any
    names: tuple[str, ...]
    read: Callable[[Any], Any]
    values: Any
    label: Callable[[str], str]


@dataclass(frozen=True)
class _WatchedTensor:
    """A tensor that is no buffer: watched for replacement, of its memory too, and for writes by its version counter."""

    owner: Any
    name: str
    tensor: Tensor
    version: int | None  # None: its values are no setting
    pointer: int | None
    label: str


class WatchList:
    """Collects the watched names, and compares them.

    Args:
        effects: what the capture's run was seen to read and write; None: whatever is in reach is watched.
        leaves: paths of modules that read their own attributes on every run; "": all modules.
        inputs: identities of the tensors that the graph reads at every step, whose values are no setting.
    """

    def __init__(self, effects: SideEffects | None, leaves: Collection[str], inputs: Collection[int]) -> None:
        follows_all, effects = effects is None, effects or SideEffects()
        names: set[str] = set()
        project_names: set[str] = set()
        for code in effects.functions_run:
            names |= names_in_code(code)
            project_names |= set(code.co_names) if is_project_file(code.co_filename) else set()
        # None: any name counts; otherwise only names that occur in functions that ran.
        self._said = None if follows_all or project_names & _DYNAMIC else names
        self._touched = {python_name.key for python_name in effects.written_names}
        self._leaves, self.inputs = leaves, inputs
        self.rows: list[_WatchedNames] = []
        self.tensors: list[_WatchedTensor] = []
        self.tables: list[tuple[Any, int, Callable[[str], str], Any, frozenset[Any]]] = []
        self.objects: list[tuple[Any, str, Any, str]] = []
        self.contents: list[tuple[Any, Any, str]] = []
        self.cells: list[tuple[PythonName, Any]] = []
        self._environment = {key: os.environ.get(key) for key in effects.environment_keys}
        self.files = {path: _file_mark(path) for path in effects.files}
        self._seen: set[int] = set()

    # ---- what is watched

    def module(self, path: str, module: nn.Module) -> None:
        """Watch attributes of a module."""
        if any(is_inside(path, leaf) for leaf in self._leaves):
            return
        prefix = f"{path}." if path else "model."
        self._dict(module.__dict__, lambda name: f"{prefix}{name}", 0, module, TORCHS)

    def watch_name(self, python_name: PythonName) -> None:
        """Watch a global, a closure variable, or an attribute of an object."""
        # What the run itself writes is state, which effects handle, not a setting.
        if python_name.key in self._touched or "" in self._leaves:
            return
        value = python_name.get()
        # A cell has no dict: its content is compared by itself.
        if isinstance(python_name.owner, types.CellType):
            self.cells.append((python_name, value))
            if type(value) not in PLAIN:
                self._value(value, python_name.label, 1)
        elif python_name.kind == "default":
            self._value(value, python_name.label, 1)
        else:
            names = python_name.owner if isinstance(python_name.owner, dict) else vars(python_name.owner)
            self._names(names, [python_name.name], lambda _: python_name.label, 0)

    def _dict(
        self, own: Mapping[str, Any], label: Callable[[str], str], depth: int, owner: Any, without: Collection[str] = ()
    ) -> None:
        if id(own) in self._seen or len(self._seen) > _MANY:
            return
        self._seen.add(id(own))
        is_short = len(own) <= _MANY  # a table of very many numbers is data, as a long list is
        names = [n for n in own if (isinstance(n, str) or is_short) and n not in without and self._counts(owner, n)]
        self._names(own, names, label, depth)
        self.tables.append((own, len(own), label, owner, frozenset(own)))

    def _counts(self, owner: Any, name: Any) -> bool:
        is_said = self._said is None or not isinstance(name, str) or name in self._said
        return is_said and (id(owner), name) not in self._touched

    def _names(self, table: Any, names: Sequence[str], label: Callable[[str], str], depth: int) -> None:
        plain = tuple(name for name in names if _is_plain(table[name]))
        # One itemgetter reads all plain values of a dict: this comparison runs before every step.
        if plain:
            read = operator.itemgetter(*plain)
            self.rows.append(_WatchedNames(table, plain, read, read(table), label))
        for name in names:
            value = table[name]
            if isinstance(value, Tensor):
                self._tensor(table, name, value, None if id(value) in self.inputs else value._version, label(name))
            elif name not in plain:
                if name not in _TABLES:
                    self.objects.append((table, name, value, label(name)))
                self._value(value, label(name), depth + 1)

    def _tensor(self, table: Any, name: str, value: Tensor, version: int | None, label: str) -> None:
        pointer = None if id(value) in self.inputs else _pointer(value)
        self.tensors.append(_WatchedTensor(table, name, value, version, pointer, label))

    def _outside(self, module: nn.Module, label: str) -> None:
        """Watch the tensors of a module that is no part of the model: the graph reads them where they are."""
        for path, inner in module.named_modules(prefix=label):
            for table in (inner._parameters, inner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and id(tensor) not in self.inputs and len(self._seen) <= _MANY:
                        self._seen.add(id(tensor))
                        self._tensor(table, name, tensor, None, f"{path}.{name}")

    def _value(self, value: Any, label: str, depth: int) -> None:
        if depth > _DEPTH or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._seen.add(id(value))
            self._outside(value, label)
        elif isinstance(value, dict) and _reads_as_dict(value):
            self._dict(value, lambda name: f"{label}[{name!r}]", depth, value)
        elif _is_read_whole(value):
            self._seen.add(id(value))
            self.contents.append((value, _fingerprint(value, self.inputs), label))
            for i, element in enumerate(children_of(value) if isinstance(value, list | tuple) else ()):
                if not _is_plain(element):
                    self._value(element, f"{label}[{i}]", depth + 1)
        elif isinstance(value, _READ) or (is_of_project_class(value) and not hasattr(value, "__dict__")):
            self.contents.append((value, _fingerprint(value, self.inputs), label))
            is_slotted = is_of_project_class(value)
            for name, inner in slots_of(value).items() if is_slotted else enumerate(children_of(value)):
                self._value(inner, f"{label}.{name}" if is_slotted else f"the value of {label}", depth + 1)
        elif is_of_project_class(value):
            self._dict(value.__dict__, lambda name: f"{label}.{name}", depth, value)

    # ---- comparison

    def find_change(self) -> str | None:
        """Return a label of the first difference but in files, or None."""
        for row in self.rows:
            try:
                if row.read(row.owner) == row.values:
                    continue
            except Exception:  # the name is gone, or its value cannot be compared
                pass
            return row.label(_first_changed(row))
        if (change := next(self.list_other_changes(), None)) is not None:
            return change[1]
        for python_name, value in self.cells:
            if type(value) in PLAIN and _differs(python_name.get(), value):
                return python_name.label
        for key, text in self._environment.items():
            if os.environ.get(key) != text:
                return f"the environment's {key}"
        return None

    def find_changed_file(self) -> str | None:
        """Return the first file that was written, replaced, made or removed, or None."""
        return next((path for path, mark in self.files.items() if _file_mark(path) != mark), None)

    def list_other_changes(self) -> Iterator[tuple[str, str]]:
        """Yield what differs and is no plain value: its place, ending in "[:]" for what is inside, and its label."""
        for entry in self.tensors:
            # In-place writes raise a tensor's version counter.
            written = entry.version is not None and entry.tensor._version != entry.version
            moved = entry.pointer is not None and _pointer(entry.tensor) != entry.pointer
            if entry.owner.get(entry.name, None) is not entry.tensor:
                yield entry.label, entry.label
            elif written or moved:
                yield f"{entry.label}[:]", entry.label
        for table, size, label, owner, names in self.tables:
            if len(table) != size and (new := self._new(table, owner, names)):
                yield f"{label('')}[:]", label(new)
        for table, name, value, description in self.objects:
            if table.get(name) is not value:
                yield description, description
        for value, fingerprint, description in self.contents:
            if _fingerprint(value, self.inputs) != fingerprint:
                yield f"{description}[:]", description
        for python_name, value in self.cells:
            if type(value) not in PLAIN and _differs(python_name.get(), value):
                yield python_name.label, python_name.label

    def _new(self, table: Mapping[str, Any], owner: Any, names: frozenset[Any]) -> str | None:
        """Return a new key of a dict that counts: a watched name, or what has no name, such as a hook."""
        new = [n for n in table if n not in names and (not isinstance(n, str) or self._counts(owner, n))]
        return str(new[0]) if new else None


def _file_mark(path: str) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced, or a folder made; None where there is neither."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # it is not there, or its name cannot be one
        return None
    if stat.S_ISDIR(status.st_mode):  # what is put into it, such as a checkpoint, is no change of what was asked for
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _reads_as_dict(value: dict[Any, Any]) -> bool:
    """Return whether a dict is read by Python's own methods, so that no code of the user's runs before every step."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    names = ("__iter__", "__len__", "__getitem__", "get")
    return all(getattr(type(value), name) is getattr(kind, name) for name in names)


def _is_read_whole(value: Any) -> bool:
    """Return whether a value counts by its content: an array, or a container of not too many values."""
    is_memory = is_array(value) or read_memory(value) is not None
    return is_memory or (isinstance(value, (dict, *_CONTAINERS)) and len(children_of(value)) <= _MANY)


def _fingerprint(value: Any, inputs: Collection[int], depth: int = 0) -> Any:
    """Return what changes if the content of a container or an array does; an object inside counts by its identity."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), None if id(value) in inputs else value._version
    if isinstance(value, (dict, *_CONTAINERS)):
        if depth > _DEPTH:
            return id(value)
        if isinstance(value, set | frozenset):
            return set(frozenset.__iter__(value) if isinstance(value, frozenset) else set.__iter__(value))
        return [_fingerprint(child, inputs, depth + 1) for child in children_of(value)]
    if isinstance(value, _READ):
        return [_fingerprint(child, inputs, depth + 1) for child in children_of(value)]
    if is_of_project_class(value) and not hasattr(value, "__dict__"):
        return [(name, _fingerprint(slot_value, inputs, depth + 1)) for name, slot_value in slots_of(value).items()]
    if is_array(value):
        return value.shape, value.tobytes() if not value.dtype.hasobject else repr(value)
    return id(value) if (memory := read_memory(value)) is None else memory


def _pointer(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None where it has none."""
    if getattr(tensor, "is_deferred", False):  # a value of a prepared script that is still to be computed
        return None
    return tensor.data_ptr() if tensor.layout == torch.strided and not tensor.is_meta else None


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and len(value) < 9 and all(type(v) in PLAIN for v in value))


def _first_changed(row: _WatchedNames) -> str:
    values = row.values if len(row.names) > 1 else (row.values,)
    for name, value in zip(row.names, values, strict=True):
        if _differs(row.owner.get(name, MISSING), value):
            return name
    return row.names[0]


def _differs(current_value: Any, value: Any) -> bool:
    try:
        return current_value is not value and (current_value is MISSING or not bool(current_value == value))
    except Exception:  # it cannot be compared
        return True
