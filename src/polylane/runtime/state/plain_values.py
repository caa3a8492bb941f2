"""Plain values: state of the user's objects, such as a scheduler's ``state_dict()``, as values that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError

TENSOR = "polylane.tensor"  # key of a mapping that stands for a tensor
SCALARS = (bool, int, float, str, bytes, type(None))  # types of values that a file holds as they are


def to_plain(value: Any, label: str) -> Any:
    """Return a value that a file can hold: of mappings, lists, tuples, numbers and texts, with marked tensors.

    Args:
        value: state of an object of the user's; its tensors are small, since each of their numbers becomes text.
        label: where it is from, for errors.

    Raises:
        PolylaneError: a part of it is of another type.
    """
    if isinstance(value, Tensor):
        return {TENSOR: [str(value.dtype), value.detach().cpu().reshape(-1).tolist(), list(value.shape)]}
    if isinstance(value, Mapping):
        return {key: to_plain(item, f"{label}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, label) for item in value)
    if isinstance(value, SCALARS):
        return value
    raise PolylaneError(
        f"{label} has a {type(value).__name__}, which no checkpoint can hold: let it be made of numbers, texts and "
        "tensors (of a scheduler, by a state_dict() and load_state_dict() of its own)"
    )


def from_plain(value: Any) -> Any:
    """Return the value that :func:`to_plain` was given, with tensors on the CPU."""
    if isinstance(value, Mapping) and TENSOR in value:
        dtype, values, shape = value[TENSOR]
        return torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).view(shape)
    if isinstance(value, Mapping):
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def numpy_state(saved: Any) -> tuple[Any, ...]:
    """Return the state of NumPy's generator that a checkpoint has as plain values.

    Raises:
        PolylaneError: it is none; NumPy itself would read memory that is not its own.
    """
    import numpy

    kind, keys, position, *gauss_state = saved
    # From the manifest, which people can edit: NumPy does not check what set_state is given.
    if kind != "MT19937" or len(keys) != 624 or type(position) is not int or not 0 <= position <= 624:
        raise PolylaneError("a state of NumPy's random generator has a place outside of its 624 numbers")
    return kind, numpy.array(keys, dtype="uint32"), position, *gauss_state
