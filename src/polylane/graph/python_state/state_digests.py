"""Digests of Python state: hashes by which a change of a value, or of anything inside it, is detected."""

from __future__ import annotations

import hashlib
import itertools
import types
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from polylane.graph.python_state.own_objects import MOST_VALUES, PLAIN, children_of, generator_state, is_array

_LONG = 2_000  # of longer sequences only the first and last elements, this many in all, are hashed


class StateDigests:
    """Digests of values with all that is inside them, except what belongs to torch; equal if nothing has changed.

    Args:
        known: ids of the model's own modules, parameters and buffers, which are not followed.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
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


class _Digest:
    def __init__(self, known: Collection[int]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._known, self._left = known, MOST_VALUES
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
            self._update_hash(len(value), sorted(repr(each) for each in value if type(each) in PLAIN))
        elif isinstance(value, types.GeneratorType):
            self._update_hash(value.gi_frame and value.gi_frame.f_lasti)
            self.add_value({} if value.gi_frame is None else dict(value.gi_frame.f_locals))
        elif isinstance(value, (itertools.count, bytearray)):
            self._update_hash(repr(value))
        elif is_array(value):
            self._update_hash(value.shape, str(value.dtype))
            self.hash.update(value.tobytes() if value.dtype.hasobject is False else repr(value).encode())
        else:
            inner = children_of(value)
            self._update_hash(len(inner))
            for each in inner if len(inner) <= _LONG else (*inner[: _LONG // 2], *inner[-_LONG // 2 :]):
                self.add_value(each)

    def _tensor(self, value: Tensor) -> None:
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
