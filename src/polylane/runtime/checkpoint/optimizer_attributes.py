"""Optimizer attributes: what an optimizer keeps beside its state (slow weights, averages, generators), saved by place.

    self.slow[0][1]            attribute/loss/slow/0/1
    self.ema[id(parameter)]    attribute/loss/ema/layers.0.weight
    self.base.count            attribute/loss/base/count           of an optimizer inside

Numbers and texts that are attributes themselves are options (:mod:`polylane.runtime.checkpoint.optimizer_state`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polylane.compile.optimizer_parts import find_tensors, own_attributes
from polylane.compile.optimizer_sequence import optimizers_in
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.held_tensors import WorkerState, whole_region
from polylane.runtime.checkpoint.optimizer_state import Fill, find_variant
from polylane.runtime.checkpoint.plain_values import SCALARS, from_plain, to_plain

_SEQUENCES = (list, tuple, deque)


@dataclass(frozen=True)
class _Kept:
    """A value that an optimizer keeps.

    Attributes:
        path: where it is, by names and numbers.
        owner: name of the parameter that it belongs to, by its key; "" where none is known.
        value: a tensor, a random generator, or plain values.
        replace: puts another value in its place.
    """

    path: str
    owner: str
    value: Any
    replace: Callable[[Any], None]


def collect_attributes(
    objective: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    speaks_for: Callable[[str], bool],
    variant: str = "",
) -> WorkerState:
    """Return what an optimizer keeps in attributes of its own.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        names: names of all parameters, by id.
        speaks_for: whether this worker saves what belongs to a parameter; of "", what belongs to none.
        variant: ending of names for state that is one replica's own.
    """
    found = WorkerState()
    for kept in _find_kept(optimizer, names):
        if not speaks_for(kept.owner):
            continue
        path, value = f"attribute/{objective}/{kept.path}", kept.value
        if isinstance(value, Tensor):
            found.add(path + variant, whole_region(value.shape), value.detach())
            value = None
        elif isinstance(value, torch.Generator):
            value = value.get_state().tolist()
        found.plain[path + variant] = to_plain(list(value) if isinstance(value, _SEQUENCES) else value, kept.path)
    return found


def restore_attributes(
    objective: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    plain: Mapping[str, Any],
    fill: Fill,
    variant: str = "",
) -> None:
    """Give an optimizer what a checkpoint has of its attributes.

    Raises:
        PolylaneError: the optimizer has made one of these in its first steps, and has none yet.
    """
    prefix = f"attribute/{objective}/"
    saved = {path.removeprefix(prefix).partition("@")[0] for path in plain if path.startswith(prefix)}
    for kept in _find_kept(optimizer, names):
        if kept.path not in saved:
            continue
        saved.remove(kept.path)
        if isinstance(kept.value, Tensor):
            fill(prefix + kept.path + variant, whole_region(kept.value.shape), kept.value.detach())
            continue
        value = from_plain(find_variant(plain, prefix + kept.path, variant))
        if isinstance(kept.value, torch.Generator):
            kept.value.set_state(torch.tensor(value, dtype=torch.uint8))
        elif isinstance(kept.value, deque):
            kept.replace(deque(value, kept.value.maxlen))
        else:
            make = getattr(type(kept.value), "_make", type(kept.value))  # a named tuple takes its values one by one
            kept.replace(make(value) if isinstance(kept.value, _SEQUENCES) else value)
    if saved:
        raise PolylaneError(
            f"has {min(saved)} of the {type(optimizer).__name__}, which makes it in a step: let its constructor make it"
        )


def _find_kept(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[_Kept]:
    for number, each in enumerate(optimizers_in(optimizer)):
        yield from _find_kept_in(each, names, str(number or ""))


def _find_kept_in(optimizer: torch.optim.Optimizer, names: Mapping[int, str], place: str) -> Iterator[_Kept]:
    # A wrapper may share these with the optimizer inside; they are saved by the parameters' names.
    known = {id(optimizer.state), id(optimizer.param_groups), id(optimizer.defaults), *names}

    def visit(value: Any, path: str, owner: str, replace: Callable[[Any], None], depth: int) -> Iterator[_Kept]:
        if id(value) in known:
            return
        if isinstance(value, (Tensor, torch.Generator)) or (depth > 1 and isinstance(value, SCALARS)):
            yield _Kept(path, owner, value, replace)
        elif isinstance(value, torch.optim.Optimizer):
            known.add(id(value))
            inside = {**dict(own_attributes(value)), "state": value.state, "param_groups": value.param_groups}
            yield from visit_all(inside.items(), vars(value), path, owner, depth)
        elif isinstance(value, (Mapping, *_SEQUENCES)):
            if not find_tensors(value) and _is_plain(value):
                yield _Kept(path, owner, value, replace)
            else:
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                yield from visit_all(items, value, path, owner, depth)

    def visit_all(items: Iterable[Any], container: Any, path: str, owner: str, depth: int) -> Iterator[_Kept]:
        for key, value in list(items):
            name = names.get(key if isinstance(key, int) else id(key), "")
            place = f"{path}/{name or key}" if path else str(name or key)
            yield from visit(value, place, name or owner, partial(_replace, container, key, place), depth + 1)

    yield from visit_all(own_attributes(optimizer), vars(optimizer), place, "", 0)


def _replace(container: Any, key: Any, place: str, value: Any) -> None:
    """Put a value into a container.

    Raises:
        PolylaneError: nothing can be put into it, such as a tuple.
    """
    try:
        container[key] = value
    except TypeError:
        kind = type(container).__name__
        raise PolylaneError(
            f"the optimizer keeps {place} in a {kind}, into which nothing can be put again: keep it in a list or a dict"
        ) from None


def _is_plain(value: Any) -> bool:
    """Return whether a file can hold a value as it is, of numbers and texts in mappings and sequences."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, _SEQUENCES) else isinstance(value, SCALARS)
