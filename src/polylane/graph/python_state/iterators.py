"""Iterators as state: where one is, and a copy of it that begins there.

An iterator only goes forward. Those of Python and itertools say what they are made of (``__reduce__``), so that a copy
can take their place after a run that used some of it up. A generator, or the iterator of a DataLoader, says nothing:
what a capture took from it is lost.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from polylane.graph.python_state.own_objects import MOST_VALUES, PLAIN, children_of

FORWARD_ONLY = (types.GeneratorType, _BaseDataLoaderIter)


def is_built_in_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python's own, such as of a list, of zip or of itertools."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator) and kind not in FORWARD_ONLY


def parts_of_iterator(value: Any) -> tuple[Any, ...] | None:
    """Return what makes an iterator that is where this one is: a function, its arguments, perhaps a state.

    None where the iterator does not say it (those of itertools from Python 3.14 on).
    """
    try:
        parts: tuple[Any, ...] = value.__reduce__()
    except TypeError:  # cannot be pickled: a generator, a file
        return None
    return parts


def copy_iterator(value: Any) -> Any:
    """Return an iterator that is where a built-in one is; what these go over is shared, iterators inside are copied."""
    parts = parts_of_iterator(value)
    if parts is None:
        return value
    make, arguments, *state = parts
    copied = make(*map(_copy_inner, arguments))
    if state and state[0] is not None:
        state = [tuple(map(_copy_inner, state[0])) if isinstance(state[0], tuple) else state[0]]
        if make is itertools.cycle:  # which appends to its own list of what it has given
            state = [(list(state[0][0]), *state[0][1:])]
        copied.__setstate__(*state)
    return copied


def _copy_inner(value: Any) -> Any:
    return copy_iterator(value) if is_built_in_iterator(value) else value


def digest_parts(value: Any) -> tuple[Any, ...] | None:
    """Return plain values that change when an iterator goes forward; None for anything but an iterator."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return (None,) if frame is None else (frame.f_lasti, dict(frame.f_locals))
    if isinstance(value, _BaseDataLoaderIter):
        return (value._num_yielded,)
    if is_built_in_iterator(value):
        parts = parts_of_iterator(value)
        return parts and (type(value).__name__, *parts[1:])
    return None


def find_forward_only(value: Any) -> Any:
    """Return an iterator in a value, however deep, that cannot be put back; None where there is none."""
    pending, visited = [value], dict[int, Any]()
    while pending and len(visited) < MOST_VALUES:
        value = pending.pop()
        if isinstance(value, FORWARD_ONLY):
            return value
        if type(value) not in PLAIN and id(value) not in visited:
            visited[id(value)] = value
            parts = parts_of_iterator(value) if is_built_in_iterator(value) else None
            pending += children_of(value) if parts is None else parts[1:]
    return None
