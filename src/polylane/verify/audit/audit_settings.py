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
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.graph.python_state.captured_settings import CapturedSettings
from polylane.graph.python_state.own_objects import MISSING, PLAIN, is_array, read_memory, slots_of, write_memory
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.python_state.state import PythonName
from polylane.graph.python_state.watched_values import WatchList
from polylane.runtime.plain_data.serialization import encode

# The environment by which a data set or a model may find out which worker it is in.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_MODES, _ENVIRONMENT = "training modes", "the environment"  # places of a kind of their own
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


@dataclass(frozen=True)
class _Name:
    """A name in a dict; what is inside of the object that had it at the start is a place of its own."""

    owner: Any
    name: str
    at_start: Any

    def read(self) -> Any:
        return _copy_named(self.owner.get(self.name, MISSING), self.at_start)

    def write(self, content: Any) -> None:
        value = self.owner.get(self.name, MISSING)
        if isinstance(self.owner, dict):
            self.owner[self.name] = _put_inside(value, content)
        elif type(value) is not type(content) or value != content:
            raise PolylaneError(f"{self.name} was changed, which belongs to a class")


@dataclass(frozen=True)
class _Variable:
    """A variable of a closure."""

    place: PythonName
    at_start: Any

    def read(self) -> Any:
        return _copy_named(self.place.get(), self.at_start)

    def write(self, content: Any) -> None:
        self.place.put(_put_inside(self.place.get(), content))


@dataclass(frozen=True)
class _Inside:
    """What is inside of a container, an array, a context variable, or an object with slots."""

    value: Any

    def read(self) -> Any:
        if isinstance(self.value, contextvars.ContextVar):
            return _copy_content(self.value.get(MISSING))
        if (memory := read_memory(self.value)) is not None:
            return memory
        if isinstance(self.value, _CONTAINERS) or is_array(self.value):
            return _copy_content(self.value)
        return _copy_content(slots_of(self.value))

    def write(self, content: Any) -> None:
        if isinstance(self.value, contextvars.ContextVar):
            self.value.set(content)
        elif isinstance(content, bytes):
            write_memory(self.value, content)
        elif isinstance(self.value, _CONTAINERS) or is_array(self.value):
            _put_inside(self.value, content)
        else:
            for name, inner in content.items():
                setattr(self.value, name, _put_inside(getattr(self.value, name, None), inner))


@dataclass(frozen=True)
class _Table:
    """Names that were added to a dict since the start, or taken away."""

    owner: dict[Any, Any]
    names: frozenset[Any]

    def read(self) -> Any:
        added = {name: _copy_content(self.owner[name]) for name in self.owner if name not in self.names}
        if any(content is MISSING for content in added.values()):
            return MISSING
        return added, [name for name in self.names if name not in self.owner]

    def write(self, content: Any) -> None:
        added, removed = content
        for name in {*removed, *(self.owner.keys() - self.names - added.keys())}:
            self.owner.pop(name, None)
        self.owner.update(added)


_Place = _Name | _Variable | _Inside | _Table


class AuditSettings:
    """The values that the user's Python has, as one objective may read them.

    Those of leaves are among them: a plan runs the user's Python for these, and need not look at them. Handed over is
    all that is in reach and was changed, whatever the capture has seen: it may have overlooked what a step reads. What
    was not changed may be a counter that a wrong graph does not move, and the auditor's own code does.

    Args:
        prepared: the training, compiled for its plan.
        objective: name of the loss.
    """

    def __init__(self, prepared: CompiledTraining, objective: str) -> None:
        effects = prepared.partitions[objective].graph.code.effects or SideEffects()
        model, computed = prepared.model, prepared.objectives[objective]
        self._read = CapturedSettings(model, [computed.loss], effects, (), True)
        # With its lines that only note something: a data set may read what they note.
        self._in_reach = CapturedSettings(model, [computed.given_loss], None, (), True)
        self._places = dict(_list_places(self._in_reach.watched))
        self._start = {label: _mark(content) for label, content in self._read_places()}
        # Of what a step reads by a plain name, also what was not changed.
        self._told = {row.label(name) for row in self._read.watched.rows for name in row.names} & self._start.keys()
        self._environment = dict(os.environ)

    def find_unreadable_change(self, values: Mapping[str, Any]) -> str | None:
        """Return what has changed since the start of what a step reads and is not handed over; None if nothing has.

        Args:
            values: what :meth:`read_values` has returned.
        """
        if (module := self._read.find_replaced_module()) is not None:
            return module
        changes = self._read.watched.list_other_changes()
        unread = next((label for key, label in changes if key not in values), None)
        return unread or next(self._list_exchanged_code(), None)

    def _list_exchanged_code(self) -> Iterator[str]:
        """Yield names of functions, classes and modules that others have now, whether a step is known to run them."""
        for owner, name, value, label in self._in_reach.watched.objects:
            if callable(value) and owner.get(name, MISSING) is not value:
                yield label

    def read_values(self) -> dict[str, Any]:
        """Return what there is to be handed over, by place: values, the modes of modules, the environment."""
        values = dict[str, Any]()
        for label, content in self._read_places():
            # Told from then on, for it may become again what it was.
            if label in self._told or _mark(content) != self._start.get(label):
                self._told.add(label)
                values[label] = content
        current, initial = (
            {k: v for k, v in variables.items() if k not in RANK_VARIABLES}
            for variables in (os.environ, self._environment)
        )
        environment = {
            key: current.get(key) for key in current.keys() | initial.keys() if current.get(key) != initial.get(key)
        }
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

    def _read_places(self) -> Iterator[tuple[str, Any]]:
        for label, slot in self._places.items():
            if (content := slot.read()) is not MISSING:
                yield label, content


def watch_settings(prepared: CompiledTraining) -> dict[str, AuditSettings]:
    """Return the values that the user's Python has now, by objective."""
    return {name: AuditSettings(prepared, name) for name in prepared.partitions}


def _list_places(watched: WatchList) -> Iterator[tuple[str, _Place]]:
    """Yield the places whose values count, by labels as :meth:`WatchList.list_other_changes` has them.

    Two with one label are left out: another process could not tell which of them is meant.
    """
    places: list[tuple[str, _Place]] = []
    for row in watched.rows:
        places += [(row.label(name), _Name(row.owner, name, row.owner[name])) for name in row.names]
    places += [(label, _Name(owner, name, value)) for owner, name, value, label in watched.objects]
    places += [
        (entry.label, _Name(entry.owner, entry.name, entry.tensor))
        for entry in watched.tensors
        if id(entry.tensor) not in watched.inputs  # the weights come with every step
    ]
    places += [(cell.label, _Variable(cell, value)) for cell, value in watched.cells]
    places += [(f"{label}[:]", _Inside(value)) for value, _, label in watched.contents]
    places += [(f"{label('')}[:]", _Table(owner, names)) for owner, _, label, _, names in watched.tables]
    count = Counter(label for label, _ in places)
    return (pair for pair in places if count[pair[0]] == 1)


def _copy_named(value: Any, at_start: Any) -> Any:
    """Return what a name has now; MISSING for the object from the start, whose inside is a place of its own."""
    is_plain = isinstance(value, (Tensor, *PLAIN))
    return MISSING if value is at_start and not is_plain else _copy_content(value)


def _copy_content(value: Any, is_nested: bool = False) -> Any:
    """Return what another process can be told of a value; MISSING for objects, weights, and what contains them.

    Args:
        value: any value of the user's; what is inside of a deque is returned as a list, an array as a tensor.
        is_nested: whether it is inside of a container, which has it by no name.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        is_weight = isinstance(value, nn.Parameter) or value.requires_grad
        is_readable = value.layout == torch.strided and not value.is_meta and (not is_weight or not is_nested)
        return value.detach().to("cpu", copy=True) if is_readable else MISSING
    if is_array(value):
        return MISSING if is_nested else _copy_array(value)
    if not isinstance(value, _CONTAINERS) or (is_nested and type(value) not in _CONTAINERS[:-1]):
        return MISSING
    if isinstance(value, dict):
        keys, inner = ([_copy_content(item, True) for item in part] for part in (dict.keys(value), dict.values(value)))
        return MISSING if _lacks_any([*keys, *inner]) else dict(zip(keys, inner, strict=True))
    kind: Any = next(container for container in _CONTAINERS if isinstance(value, container))
    inner = [_copy_content(item, True) for item in kind.__iter__(value)]
    is_set_of_tensors = kind in (set, frozenset) and any(isinstance(item, Tensor) for item in inner)
    if is_set_of_tensors or _lacks_any(inner):
        return MISSING
    return inner if kind is deque else kind(inner)


def _copy_array(value: Any) -> Any:
    """Return a tensor with the numbers of an array; MISSING for arrays of anything else."""
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # of texts, dates, objects, or numbers that torch does not have
        return MISSING


def _lacks_any(contents: Sequence[Any]) -> bool:
    return any(item is MISSING for item in contents)


def _put_inside(value: Any, content: Any) -> Any:
    """Return what holds ``content`` instead of ``value``: the same object where it can be written into."""
    if isinstance(value, Tensor) and isinstance(content, Tensor):
        if value.shape == content.shape and value.dtype == content.dtype:
            value.data.copy_(content)
            return value
    elif is_array(value) and isinstance(content, Tensor):
        value[...] = content.numpy()
        return value
    elif isinstance(value, list) and isinstance(content, list):
        # Tensors of a list may be had elsewhere too.
        value[:] = [*map(_put_inside, value, content), *content[len(value) :]]
        return value
    elif isinstance(value, deque) and isinstance(content, list):
        value.clear()
        value.extend(content)
        return value
    elif isinstance(value, dict | set) and isinstance(content, dict | set):
        value.clear()
        value.update(content)
        return value
    return content


def _mark(content: Any) -> bytes:
    """Return what differs between two contents, in few bytes."""
    return hashlib.blake2b(encode(content), digest_size=16).digest()
