"""Digests of Python state: whether a value, and all that is inside of it, is still what it was."""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.own_objects import (
    MOST_VALUES,
    PLAIN,
    defaults_of,
    fields_of,
    generator_state,
    has_own_class,
    is_array,
    is_filled,
    is_own,
)

_LONG = 2_000  # elements of a sequence, of which the first and the last are looked at


class Digests:
    """Digests of values, all the way down, but for what belongs to torch: equal where nothing has changed.

    Args:
        known: ids of the model's own modules, parameters and buffers, which are not looked into.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> Any:
        """The digest of a value."""
        if type(value) in PLAIN:
            return type(value), repr(value)
        if id(value) not in self._digests:
            walk = _Digest(self._known)
            walk.take(value)
            self._digests[id(value)] = value, walk.hash.digest()
        return self._digests[id(value)][1]


class _Digest:
    def __init__(self, known: Collection[int]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._known, self._left = known, MOST_VALUES
        # By id; each is held, so that none that is made on the way gives its id to another one.
        self._seen = dict[int, tuple[int, Any]]()

    def _say(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def take(self, value: Any) -> None:
        self._left -= 1
        kind = type(value)
        if kind in PLAIN:
            self._say(kind.__name__, value)
        elif id(value) in self._known:
            self._say("own", id(value))
        elif id(value) in self._seen:
            self._say("again", self._seen[id(value)][0])
        elif self._left > 0:
            self._seen[id(value)] = len(self._seen), value
            self._say(kind.__name__)
            self._inside(value)

    def _inside(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, dict):
            self._all(itertools.chain.from_iterable(_ends(list(value.items()))))
            self._say(len(value))
        elif isinstance(value, (list, tuple, deque)):
            self._say(len(value))
            self._all(_ends(list(value)))
        elif isinstance(value, (set, frozenset)):
            self._say(len(value), sorted(repr(each) for each in value if type(each) in PLAIN))
        elif (state := generator_state(value)) is not None:
            self._say(str(state))
        elif isinstance(value, types.GeneratorType):
            self._say(value.gi_frame and value.gi_frame.f_lasti)
            self.take({} if value.gi_frame is None else dict(value.gi_frame.f_locals))
        elif isinstance(value, (itertools.count, bytearray)):
            self._say(repr(value))
        elif is_array(value):
            self._say(value.shape, str(value.dtype))
            self.hash.update(value.tobytes() if value.dtype.hasobject is False else repr(value).encode())
        elif isinstance(value, types.MethodType):
            self.take(value.__self__)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            if is_own(value.__code__.co_filename):
                self._all(cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
                self._all((defaults_of(value), vars(value)))
        elif isinstance(value, nn.Module):  # one that the model does not know of
            self._all(value.__dict__.items())
        elif has_own_class(value):
            self._all(fields_of(value).items())

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.take(value)

    def _tensor(self, value: Tensor) -> None:
        self._say(tuple(value.shape), str(value.dtype), value.device.type)
        if value.is_meta or value.layout != torch.strided or not value.numel():
            return
        value = value.detach()
        if value.device.type == "cpu":
            plain = value.contiguous().resolve_conj().resolve_neg()
            self.hash.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        else:  # atomics reorder sums there: a value kept from the last pass is the same but for rounding
            size = value.to(torch.float64).abs().sum().item()
            self._say(f"{size:.3e}")


def _ends(values: Sequence[Any]) -> Iterable[Any]:
    return values if len(values) <= _LONG else (*values[: _LONG // 2], *values[-_LONG // 2 :])
