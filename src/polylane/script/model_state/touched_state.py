"""Touched state: what a model's forward reads and writes besides its parameters, seen when it runs on fake tensors.

A call is recorded, and runs when its loss does. Until then the script must not read what the forward is still to write,
nor write what it is still to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from polylane.graph.python_state.forward_hooks import Attribute
from polylane.graph.python_state.side_effects import python_names_of, torch_object_ids
from polylane.graph.python_state.state_snapshots import StateDigests


class TouchedState(NamedTuple):
    """What a call of a model touches.

    Attributes:
        read_buffers: names in the model of the buffers that it computes with.
        written_buffers: names of those that it writes.
        python: by owner and name, labels of what it changes in Python each time: counters, lists, kept tensors.
        saves_weights: whether its backward pass computes with weights that are trained, as they are now.
    """

    read_buffers: frozenset[str] = frozenset()
    written_buffers: frozenset[str] = frozenset()
    python: Mapping[Attribute, str] = {}
    saves_weights: bool = False

    @property
    def is_written(self) -> bool:
        """Whether the call leaves anything behind besides its results."""
        return bool(self.written_buffers or self.python)


NOTHING = TouchedState()


class StateStamp:
    """What a model can reach in Python, at one moment.

    Args:
        model: whose modules, and what these refer to, are looked through.
    """

    def __init__(self, model: nn.Module) -> None:
        digests = StateDigests(torch_object_ids(model))
        self._labels, self._marks = dict[Attribute, str](), dict[Attribute, Any]()
        for name in python_names_of(model):
            key = name.path if name.path is not None else str(id(name.owner)), name.name
            self._labels[key] = name.label if name.path is None else f"self.{name.name}"
            self._marks[key] = _mark(name.get(), digests)

    def list_changed(self, earlier: StateStamp) -> dict[Attribute, str]:
        """Return what has changed since an earlier moment, with labels."""
        return {key: label for key, label in self._labels.items() if self._marks[key] != earlier._marks.get(key)}


def _mark(value: Any, digests: StateDigests) -> Any:
    """Return what tells a value from another one, which is held as long as this is."""
    if isinstance(value, Tensor):
        return _Identity(value)
    try:
        return digests.of(value)
    except Exception:  # fake tensors among its elements, which have no numbers
        return _Identity(object())


class _Identity:
    """A tensor as it is now: another object, or one that was written, is another value."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value, self._version = value, value._version if isinstance(value, Tensor) else 0

    def __eq__(self, mark: object) -> bool:
        return isinstance(mark, _Identity) and mark._value is self._value and mark._version == self._version
