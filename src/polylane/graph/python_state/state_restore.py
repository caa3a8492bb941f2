"""Snapshots of Python state: values of names, contents and all, and a function that restores them."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.python_state.own_objects import (
    MOST_VALUES,
    PLAIN,
    children_of,
    generator_state,
    is_array,
    is_filled,
    is_of_project_class,
    is_project_file,
    slots_of,
)
from polylane.graph.python_state.state import TORCHS, PythonName


def snapshot_names(where: Iterable[PythonName], known: Collection[int]) -> Callable[[], None]:
    """Record the values of names, contents and all; return a function that restores them."""
    where, walk = list(where), _Snapshot(known)
    owners = {id(place.owner): place.owner for place in where if _owns_new_names(place.owner)}
    for owner in owners.values():
        if is_of_project_class(owner):
            walk.inside(owner)
    # Names that appear later must be removed again; TORCHS are torch's own.
    before = [(owner, frozenset(vars(owner))) for owner in owners.values()]
    values = [(place, walk.of(place.get())) for place in where]

    def restore() -> None:
        for owner, names in before:
            for name in vars(owner).keys() - names - TORCHS:
                delattr(owner, name)
        for place, value in values:
            place.put(value())
        # Names first, then contents: a restored object must also contain what it did.
        for put_back in walk.contents:
            put_back()

    return restore


def _owns_new_names(owner: Any) -> bool:
    """Return whether new attributes of an owner are the user's doing; not so for the globals of a file."""
    return not isinstance(owner, (dict, types.CellType)) and hasattr(owner, "__dict__")


class _Snapshot:
    """Collects functions that restore what is inside values; the objects themselves keep their identity."""

    def __init__(self, known: Collection[int]) -> None:
        self.contents: list[Callable[[], None]] = []
        self._known, self._seen = known, dict[int, Any]()

    def of(self, value: Any) -> Callable[[], Any]:
        """Return a function that returns the value again; an iterator only goes forward, so that a copy replaces it."""
        if isinstance(value, (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))):
            kept = copy.copy(value)
            return lambda: copy.copy(kept)
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
                kept = value.copy()
                self.contents.append(lambda: value.__setitem__(Ellipsis, kept))
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or () if is_project_file(value.__code__.co_filename) else ():
                if is_filled(cell):
                    self.contents.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        elif isinstance(value, nn.Module) or is_of_project_class(value):
            if hasattr(value, "__dict__"):
                self._contents(value.__dict__)
            for name, own in slots_of(value).items():
                self.contents.append(functools.partial(object.__setattr__, value, name, own))

    def _contents(self, value: Any) -> None:
        kept = dict(value) if isinstance(value, dict) else list(value)

        def put_back() -> None:
            value.clear()
            getattr(value, "extend" if isinstance(value, (list, deque, bytearray)) else "update")(kept)

        self.contents.append(put_back)

    def _tensor(self, value: Tensor) -> None:
        # A tensor with history cannot be written; it is recomputed in every run.
        if value.is_meta or not value.is_leaf:
            return
        kept, version = value.detach().clone(), value._version

        def put_back() -> None:
            if value.shape == kept.shape and not (value._version == version and torch.equal(value, kept)):
                with torch.no_grad():
                    value.data.copy_(kept)

        self.contents.append(put_back)

    def _generator(self, value: Any) -> None:
        state = copy.deepcopy(generator_state(value))
        if isinstance(value, random.Random):
            self.contents.append(lambda: value.setstate(state))
        elif hasattr(value, "bit_generator"):
            self.contents.append(lambda: setattr(value.bit_generator, "state", state))
        else:
            self.contents.append(lambda: value.set_state(state))
