"""Audit settings: what the user's Python holds in the training, handed over to the process that replays steps.

The auditor has the user's Python as it was before the training, and replays some steps alone. What a script, a log
statement or a data set has changed since then it is told: plain values, what is inside of containers, arrays and
tensors, and what took the place of another value. Functions, modules and objects cannot be told; where a step reads one
of those that was exchanged, audits end with a note.
"""

from __future__ import annotations

import contextvars
import hashlib
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.graph.python_state.captured_settings import CapturedSettings
from polylane.graph.python_state.own_objects import (
    MISSING,
    PLAIN,
    children_of,
    is_array,
    is_shared_memory,
    read_memory,
    slots_of,
    write_memory,
)
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.python_state.watched_values import WatchList
from polylane.runtime.plain_data.serialization import encode, serializable
from polylane.runtime.workers.launch_environment import VARIABLES

_MODES, _ENVIRONMENT = "training modes", "the environment"  # places of a kind of their own
_SEQUENCES = (list, tuple, deque, set, frozenset)


@serializable
@dataclass(frozen=True)
class _Same:
    """A value inside of a container that is the object which was there at the start: what is inside of it is a place of
    its own.

    Attributes:
        index: among the values inside at the start, as :func:`children_of` has them.
    """

    index: int


@serializable
@dataclass(frozen=True)
class _Made:
    """A value that another process makes anew, because its kind cannot be sent as it is.

    Attributes:
        kind: "array", "deque" or "number", of numpy.
        content: a tensor; elements and the longest length; a plain number.
    """

    kind: str
    content: Any


class _Untold(Exception):
    """A value cannot be told to another process."""


@dataclass(frozen=True)
class _Name:
    """A name: told where it has another object than at the start; what is inside of that one is a place of its own.

    Attributes:
        get: returns what it has now, or MISSING.
        setter: gives it another object; None where that cannot be done, as for a class's own names.
        at_start: what it had at the start.
    """

    get: Callable[[], Any]
    setter: Callable[[Any], None] | None
    at_start: Any

    def read(self) -> Any:
        value = self.get()
        if self.setter is None or value is MISSING or (value is self.at_start and type(value) not in PLAIN):
            raise _Untold
        return _copy(value, {})

    def write(self, content: Any) -> None:
        assert self.setter is not None
        self.setter(_make(content, ()))

    def has_changed(self) -> bool:
        value = self.get()
        return value is not self.at_start and not (type(value) in PLAIN and repr(value) == repr(self.at_start))


@dataclass(frozen=True)
class _Inside:
    """What is inside of a tensor, an array, a container, a context variable, or an object with slots.

    Attributes:
        value: the object that has something inside.
        at_start: values inside at the start, as :func:`children_of` has them.
    """

    value: Any
    at_start: tuple[Any, ...]

    def read(self) -> Any:
        if _is_shared(self.value):
            raise _Untold
        known_objects = {id(value): index for index, value in enumerate(self.at_start)}
        if isinstance(self.value, contextvars.ContextVar):
            value = self.value.get(MISSING)
            return _copy(value, known_objects)
        if isinstance(self.value, Tensor):
            return _copy_tensor(self.value)
        if is_array(self.value):
            return _copy(self.value, {}).content
        if (memory := read_memory(self.value)) is not None:
            return memory
        if isinstance(self.value, dict):
            keys = [_copy(key, known_objects) for key in dict.keys(self.value)]
            return [keys, [_copy(value, known_objects) for value in dict.values(self.value)]]
        kind: Any = next((container for container in _SEQUENCES if isinstance(self.value, container)), None)
        if kind is not None:
            return [_copy(value, known_objects) for value in kind.__iter__(self.value)]
        return {name: _copy(value, known_objects) for name, value in slots_of(self.value).items()}

    def write(self, content: Any) -> None:
        value: Any = self.value
        if isinstance(value, contextvars.ContextVar):
            value.set(_make(content, self.at_start))
        elif isinstance(value, Tensor):
            if value.shape == content.shape and value.dtype == content.dtype:
                value.data.copy_(content)
            else:
                value.data = content
        elif is_array(value):
            value[...] = content.numpy()
        elif isinstance(content, bytes):
            write_memory(value, content)
        elif isinstance(value, dict):
            keys, values = ([_make(item, self.at_start) for item in part] for part in content)
            value.clear()
            value.update(zip(keys, values, strict=True))
        elif isinstance(value, list | deque | set):
            items = [_make(item, self.at_start) for item in content]
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items)
        elif isinstance(content, dict):
            for name, inner in content.items():
                setattr(value, name, _make(inner, self.at_start))


@dataclass(frozen=True)
class _Table:
    """Names that were added to a dict since the start, or taken away.

    Attributes:
        owner: the dict, whose names are attributes, globals or keys.
        names: its names at the start.
        label: returns what is said of a name in it.
    """

    owner: dict[Any, Any]
    names: frozenset[Any]
    label: Callable[[Any], str]

    def read(self) -> Any:
        added = {name: _copy(self.owner[name], {}) for name in self.owner if name not in self.names}
        return added, [name for name in self.names if name not in self.owner]

    def find_new_code(self) -> Any:
        """Return a name that was added with something to call, which no process beside this one has; else None."""
        return next((name for name in self.owner if name not in self.names and callable(self.owner[name])), None)

    def write(self, content: Any) -> None:
        added, removed = content
        for name in {*removed, *(self.owner.keys() - self.names - added.keys())}:
            self.owner.pop(name, None)
        self.owner.update({name: _make(value, ()) for name, value in added.items()})


_Place = _Name | _Inside | _Table


class AuditSettings:
    """The values that the user's Python has, as one objective may read them.

    Handed over is all that is in reach and was changed, also by leaves and log statements, whatever the capture has
    seen. What was not changed may be a counter that a wrong graph does not move, and the auditor's own code does.

    Args:
        prepared: the training, compiled for its plan.
        objective: name of the loss.
        tells_all: whether the other process has built its objects itself, and is told what was not changed as well.
    """

    def __init__(self, prepared: CompiledTraining, objective: str, tells_all: bool = False) -> None:
        effects = prepared.partitions[objective].graph.code.effects or SideEffects()
        model, computed = prepared.model, prepared.objectives[objective]
        self._read = CapturedSettings(model, [computed.loss], effects, (), True)
        self._in_reach = CapturedSettings(model, [computed.given_loss], None, (), True)
        self._places = dict(_list_places(self._in_reach.watched))
        start = [(label, mark, type(content) is str) for label, content, mark in self._read_places()]
        self._start = {label: mark for label, mark, _ in start}
        self._constants = {row.label(name) for row in self._read.watched.rows for name in row.names}
        self._constants |= {cell.label for cell, _ in self._read.watched.cells}
        # A text may name the device of this process, which the other does not have.
        texts = {label for label, _, is_text in start if is_text}
        self._told = self._start.keys() - texts if tells_all else self._constants & self._start.keys()
        shared = [(label, slot.value) for label, slot in self._places.items() if isinstance(slot, _Inside)]
        self._shared = [(label, value, _mark_shared(value)) for label, value in shared if _is_shared(value)]
        self._environment = dict(os.environ)

    def find_unreadable_change(self, values: Mapping[str, Any]) -> str | None:
        """Return what has changed since the start of what a step reads and is not handed over; None if nothing has.

        Args:
            values: what :meth:`read_values` has returned.
        """
        if (module := self._read.find_replaced_module()) is not None:
            return module
        for key, label in self._read.watched.list_other_changes():
            if key not in values:
                return label
        return next(self._list_unread(values), None)

    def _list_unread(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what was changed and not told: constants of a step, and all code, shared memory, classes' own names."""
        for label, value, mark in self._shared:
            if _mark_shared(value) != mark:
                yield label.removesuffix("[:]")
        for label, slot in self._places.items():
            if isinstance(slot, _Table) and (name := slot.find_new_code()) is not None:
                yield slot.label(name)
            if not isinstance(slot, _Name) or label in values or not slot.has_changed():
                continue
            if label in self._constants or callable(slot.at_start) or slot.setter is None:
                yield label

    def read_values(self) -> dict[str, Any]:
        """Return what there is to be handed over, by place: values, the modes of modules, the environment."""
        values = dict[str, Any]()
        for label, content, mark in self._read_places():
            # Told from then on, for it may become again what it was.
            if label in self._told or mark != self._start.get(label):
                self._told.add(label)
                values[label] = content
        keys = (os.environ.keys() | self._environment.keys()) - {*VARIABLES}
        environment = {k: os.environ.get(k) for k in keys if os.environ.get(k) != self._environment.get(k)}
        return {**values, _MODES: self._in_reach.read_modes(), _ENVIRONMENT: environment}

    def write_values(self, values: Mapping[str, Any]) -> None:
        """Make the values those that another process with the same model has read."""
        self._in_reach.write_modes(values[_MODES])
        for key, text in values[_ENVIRONMENT].items():
            os.environ.pop(key, None)
            os.environ.update({} if text is None else {key: text})
        for label, slot in self._places.items():
            if label in values:
                slot.write(values[label])

    def _read_places(self) -> Iterator[tuple[str, Any, bytes]]:
        """Yield label, content and mark of what can be told; the rest is no other process's to know."""
        for label, slot in self._places.items():
            try:
                content = slot.read()
                yield label, content, _mark(content)
            except (_Untold, PolylaneError, TypeError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
                continue


def watch_settings(prepared: CompiledTraining, tells_all: bool = False) -> dict[str, AuditSettings]:
    """Return the values that the user's Python has now, by objective."""
    return {name: AuditSettings(prepared, name, tells_all) for name in prepared.partitions}


def _list_places(watched: WatchList) -> Iterator[tuple[str, _Place]]:
    """Yield the places whose values count, by labels as :meth:`WatchList.list_other_changes` has them.

    Further ones with a label that was there before are numbered; both processes find them in one order.
    """
    places: list[tuple[str, _Place]] = []
    for row in watched.rows:
        places += [(row.label(name), _name_in(row.owner, name, row.owner[name])) for name in row.names]
    places += [(label, _name_in(owner, name, value)) for owner, name, value, label in watched.objects]
    places += [(cell.label, _Name(cell.get, cell.put, value)) for cell, value in watched.cells]
    insides = [(label, value) for value, _, label in watched.contents]
    insides += [(cell.label, value) for cell, value in watched.cells if isinstance(value, Tensor)]
    for entry in watched.tensors:
        if id(entry.tensor) not in watched.inputs:  # the weights come with every step
            places.append((entry.label, _name_in(entry.owner, entry.name, entry.tensor)))
            insides.append((entry.label, entry.tensor))
    for label, value in insides:
        inner = tuple(children_of(value))
        places.append((f"{label}[:]", _Inside(value, inner)))
        tensors = [item for item in inner if isinstance(item, Tensor) and id(item) not in watched.inputs]
        places += [(f"{label}[{i}][:]", _Inside(item, ())) for i, item in enumerate(tensors) if not item.requires_grad]
    places += [(f"{label('')}[:]", _Table(owner, names, label)) for owner, _, label, _, names in watched.tables]
    count = Counter[str]()
    for label, slot in places:
        count[label] += 1
        yield label if count[label] == 1 else f"{label}#{count[label]}", slot


def _name_in(owner: Any, name: Any, value: Any) -> _Name:
    """Return a name in a dict, or in the read-only names of a class."""
    setter = partial(owner.__setitem__, name) if isinstance(owner, dict) else None
    return _Name(lambda: owner.get(name, MISSING), setter, value)


def _is_shared(value: Any) -> bool:
    """Return whether the auditor, a fork, would write into the training's own memory."""
    numpy = sys.modules.get("numpy")
    is_map = numpy is not None and isinstance(value, numpy.memmap)
    is_shared_tensor = isinstance(value, Tensor) and (value.device.type != "cpu" or value.is_shared())
    return is_map or is_shared_tensor or is_shared_memory(value)


def _mark_shared(value: Any) -> bytes:
    """Return what differs if memory that processes share is written."""
    if isinstance(value, Tensor):
        return str(value._version).encode() if value.device.type != "cpu" else _mark(value.detach())
    return read_memory(value) or (_mark(torch.from_numpy(value.copy())) if is_array(value) else b"")


def _copy(value: Any, known_objects: Mapping[int, int]) -> Any:
    """Return what another process can be told of a value.

    Args:
        value: any value of the user's.
        known_objects: by identity, indices of objects that the other process has as well.

    Raises:
        _Untold: it is an object, a weight, or has one inside.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if id(value) in known_objects:
        return _Same(known_objects[id(value)])
    if isinstance(value, Tensor):
        if value.requires_grad:  # a weight is no constant
            raise _Untold
        return _copy_tensor(value)
    if is_array(value):
        return _Made("array", torch.from_numpy(value.copy()))
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
        return _Made("number", value.item())
    if kind is dict:
        return {_copy(key, known_objects): _copy(item, known_objects) for key, item in value.items()}
    if kind is deque:
        return _Made("deque", [[_copy(item, known_objects) for item in value], value.maxlen])
    if kind in (list, tuple):
        return kind(_copy(item, known_objects) for item in value)
    if kind in (set, frozenset) and all(type(item) in PLAIN for item in value):
        return value.copy()
    raise _Untold


def _copy_tensor(value: Tensor) -> Tensor:
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta or value.is_nested:
        raise _Untold
    return value.detach().to("cpu", copy=True)


def _make(content: Any, known_objects: Sequence[Any]) -> Any:
    """Return the value of which :func:`_copy` has told, with the objects that both processes have."""
    if isinstance(content, _Same):
        return known_objects[content.index]
    if isinstance(content, _Made):
        if content.kind == "deque":
            items, longest = content.content
            return deque((_make(item, known_objects) for item in items), longest)
        return content.content.numpy() if content.kind == "array" else content.content
    if type(content) is dict:
        return {_make(key, known_objects): _make(item, known_objects) for key, item in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_make(item, known_objects) for item in content)
    return content


def _mark(content: Any) -> bytes:
    """Return what differs between two contents, in few bytes."""
    return hashlib.blake2b(encode(content), digest_size=16).digest()
