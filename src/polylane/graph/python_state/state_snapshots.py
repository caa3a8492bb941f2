"""Snapshots of Python state: values of names, contents and all, digested to see changes, or recorded and restored."""

from __future__ import annotations

import copy
import hashlib
import operator
import os
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.python_state.iterators import copy_iterator, digest_parts, is_built_in_iterator
from polylane.graph.python_state.own_objects import (
    MOST_VALUES,
    PLAIN,
    children_of,
    generator_state,
    is_array,
    is_filled,
    is_of_project_class,
    is_project_file,
    read_memory,
    slots_of,
    write_memory,
)
from polylane.graph.python_state.state import TORCHS, PythonName

# In this order: an OrderedDict is a dict, whose own methods would not keep its order.
_CONTAINERS = (OrderedDict, dict, list, deque, set, bytearray)
_LONG = 2_000  # of longer sequences only the first and last elements, this many in all, are hashed


# ---- restored ----


def snapshot_names(entries: Iterable[PythonName], known_ids: Collection[int]) -> Callable[[], None]:
    """Record the values of names, contents and all, and the environment; return a function that restores them."""
    entries, walk, environment = list(entries), _Snapshot(known_ids), dict(os.environ)
    owners = {id(python_name.owner): python_name.owner for python_name in entries if _owns_new_names(python_name.owner)}
    for owner in owners.values():
        if is_of_project_class(owner):
            walk.inside(owner)
    # Names that appear later must be removed again; TORCHS are torch's own.
    old_names = [(owner, frozenset(vars(owner))) for owner in owners.values()]
    values = [(python_name, walk.of(python_name.get())) for python_name in entries]

    def restore() -> None:
        walk.renew_iterators()
        for owner, names in old_names:
            for name in vars(owner).keys() - names - TORCHS:
                delattr(owner, name)
        for python_name, value in values:
            python_name.put(value())
        # Names first, then contents: a restored object must also contain what it did.
        for put_back in walk.contents:
            put_back()
        for key in [key for key in os.environ if key not in environment]:
            del os.environ[key]
        os.environ.update({key: text for key, text in environment.items() if os.environ.get(key) != text})

    return restore


def _owns_new_names(owner: Any) -> bool:
    """Return whether new attributes of an owner are the user's doing; not so for the globals of a file."""
    return not isinstance(owner, (dict, types.CellType)) and hasattr(owner, "__dict__")


class _KeptIterator:
    """An iterator, a copy of it as it was, and what stands for it now: itself, as long as it has not gone forward."""

    def __init__(self, value: Any) -> None:
        self.again, self._kept, self._digest = value, copy_iterator(value), _digest_of(value)

    def renew(self) -> None:
        if _digest_of(self.again) != self._digest:
            self.again = copy_iterator(self._kept)


class _Snapshot:
    """Collects functions that restore what is inside values; the objects themselves keep their identity."""

    def __init__(self, known_ids: Collection[int]) -> None:
        self.contents: list[Callable[[], None]] = []
        self._known, self._seen = known_ids, dict[int, Any]()
        self._iterators = dict[int, _KeptIterator]()  # by id

    def renew_iterators(self) -> None:
        """Put back iterators that went forward: first, since names and containers take what stands for them."""
        for iterator in self._iterators.values():
            iterator.renew()

    def of(self, value: Any) -> Callable[[], Any]:
        """Return a function that returns the value again; an iterator only goes forward, so that a copy replaces it."""
        if is_built_in_iterator(value):
            self._iterators.setdefault(id(value), _KeptIterator(value))
            return lambda: self._iterators[id(value)].again
        self.inside(value)
        return lambda: value

    def inside(self, value: Any) -> None:
        """Record what is inside a value, recursively."""
        if type(value) in PLAIN or id(value) in self._known or id(value) in self._seen or len(self._seen) > MOST_VALUES:
            return
        self._seen[id(value)] = value  # kept alive, so that no other object gets its id
        self._own(value)
        for inner in () if generator_state(value) is not None else children_of(value):
            self.inside(inner)

    def _own(self, value: Any) -> None:
        """Record what a value itself holds, such as its list of elements."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif generator_state(value) is not None:
            self._generator(value)
        elif isinstance(value, (dict, list, deque, set, bytearray)):
            self._contents(value)
        elif is_array(value):
            if value.flags.writeable:
                backup = value.copy()
                self.contents.append(lambda: value.__setitem__(Ellipsis, backup))
        elif (memory := read_memory(value)) is not None:
            self.contents.append(partial(_put_memory_back, value, memory))
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or () if is_project_file(value.__code__.co_filename) else ():
                if is_filled(cell):
                    self._reference(cell, "cell_contents", cell.cell_contents)
        elif isinstance(value, nn.Module) or is_of_project_class(value):
            if hasattr(value, "__dict__"):
                self._contents(value.__dict__)
            for name, slot_value in slots_of(value).items():
                self._reference(value, name, slot_value)

    def _reference(self, owner: Any, name: str, value: Any) -> None:
        """Record what a closure's variable or a slot refers to."""
        recreate = self.of(value) if is_built_in_iterator(value) else lambda: value
        self.contents.append(lambda: object.__setattr__(owner, name, recreate()))

    def _contents(self, value: Any) -> None:
        # The methods of the built-in class itself: one of a library's may refuse what its users must not do.
        kind: Any = next(container_type for container_type in _CONTAINERS if isinstance(value, container_type))
        backup: Any = dict(kind.items(value)) if isinstance(value, dict) else list(kind.__iter__(value))
        moving = {id(child): self.of(child) for child in children_of(value) if is_built_in_iterator(child)}

        def again(inner: Any) -> Any:
            return moving[id(inner)]() if id(inner) in moving else inner

        parts = _list_parts(backup)

        def put_back() -> None:
            # What was not changed is not touched: a thread of the user's may be at it.
            current = _list_parts(dict(kind.items(value)) if isinstance(value, dict) else list(kind.__iter__(value)))
            if not moving and len(current) == len(parts) and all(map(operator.is_, current, parts)):
                return
            kind.clear(value)
            if issubclass(kind, dict):
                for key, inner in backup.items():
                    kind.__setitem__(value, key, again(inner))
            else:
                (kind.update if kind is set else kind.extend)(value, map(again, backup) if moving else backup)

        self.contents.append(put_back)

    def _tensor(self, value: Tensor) -> None:
        if getattr(value, "is_deferred", False):  # a value of a prepared script that is still to be computed
            return
        # A tensor with history cannot be written; it is recomputed in every run.
        if value.is_meta or not value.is_leaf:
            return
        backup, version = value.detach().clone(), value._version

        def put_back() -> None:
            if value.shape == backup.shape and not (value._version == version and torch.equal(value, backup)):
                with torch.no_grad():
                    value.data.copy_(backup)

        self.contents.append(put_back)

    def _generator(self, value: Any) -> None:
        state = copy.deepcopy(generator_state(value))
        if isinstance(value, random.Random):
            self.contents.append(lambda: value.setstate(state))
        elif hasattr(value, "bit_generator"):
            self.contents.append(lambda: setattr(value.bit_generator, "state", state))
        else:
            self.contents.append(lambda: value.set_state(state))


def _list_parts(content: Any) -> list[Any]:
    return [*content, *content.values()] if isinstance(content, dict) else content


def _put_memory_back(value: Any, content: bytes) -> None:
    if read_memory(value) != content:  # another process may have it, or a file
        write_memory(value, content)


# ---- digested ----


class StateDigests:
    """Digests of values with all that is inside them, except what belongs to torch; equal if nothing has changed.

    Args:
        known_ids: ids of the model's own modules, parameters and buffers, which are not followed.
    """

    def __init__(self, known_ids: Collection[int]) -> None:
        self._known = known_ids
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> Any:
        """Return the digest of a value."""
        if type(value) in PLAIN:
            return type(value), repr(value)
        if id(value) not in self._digests:
            walk = _Digest(self._known)
            walk.add_value(value)
            self._digests[id(value)] = value, walk.hash.digest()
        return self._digests[id(value)][1]


def _digest_of(value: Any) -> bytes:
    walk = _Digest(())
    walk.add_value(value)
    return walk.hash.digest()


class _Digest:
    def __init__(self, known_ids: Collection[int]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._known, self._left = known_ids, MOST_VALUES
        # By id; values are kept, so that temporary objects do not reuse an id.
        self._seen = dict[int, tuple[int, Any]]()

    def _update_hash(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def add_value(self, value: Any) -> None:
        self._left -= 1
        kind = type(value)
        if kind in PLAIN:
            self._update_hash(kind.__name__, value)
        elif id(value) in self._known:
            # By identity: replacing a parameter is a change, writing to it is training.
            self._update_hash("own", id(value))
        elif id(value) in self._seen:
            # Shared and cyclic references: hash the order of first visits.
            self._update_hash("again", self._seen[id(value)][0])
        elif self._left > 0:
            self._seen[id(value)] = len(self._seen), value
            self._update_hash(kind.__name__)
            self._inside(value)

    def _inside(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif (state := generator_state(value)) is not None:
            self._update_hash(str(state))
        elif isinstance(value, (set, frozenset)):
            # A set has no order, but its elements' texts have one.
            self._update_hash(len(value), sorted(repr(element) for element in value if type(element) in PLAIN))
        elif (parts := digest_parts(value)) is not None:
            for part in parts:
                self.add_value(part)
        elif (memory := read_memory(value)) is not None:
            self._update_hash(memory)
        elif isinstance(value, bytearray):
            self._update_hash(repr(value))
        elif is_array(value):
            self._update_hash(value.shape, str(value.dtype))
            self.hash.update(value.tobytes() if value.dtype.hasobject is False else repr(value).encode())
        else:
            inner = children_of(value)
            self._update_hash(len(inner))
            for part in inner if len(inner) <= _LONG else (*inner[: _LONG // 2], *inner[-_LONG // 2 :]):
                self.add_value(part)

    def _tensor(self, value: Tensor) -> None:
        if getattr(value, "is_deferred", False):
            return
        self._update_hash(tuple(value.shape), str(value.dtype), value.device.type)
        if value.is_meta or value.layout != torch.strided or not value.numel():
            return
        value = value.detach()
        if value.device.type == "cpu":
            plain = value.contiguous().resolve_conj().resolve_neg()
            self.hash.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        else:  # atomics reorder sums there: a value kept from the last pass is the same but for rounding
            size = value.to(torch.float64).abs().sum().item()
            self._update_hash(f"{size:.3e}")
