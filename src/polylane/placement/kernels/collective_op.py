"""Operators that communicate inside: one function over all axes that cut what it reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from polylane.placement.redistribute import Axis
from polylane.placement.strategy import RankCall


class AxisCollective:
    """An operator of a graph that communicates along axes: ``across(axis, ..., *arguments)``.

    Args:
        function: called as ``function(axes, *arguments)``.
        axes: how many there are.
    """

    __module__ = "polylane"

    def __init__(self, function: Callable[..., Any], axes: int = 1) -> None:
        self.function, self.axes = function, axes
        self.__name__ = str(getattr(function, "__name__", "across"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(args[: self.axes], *args[self.axes :], **kwargs)


def call_along_axis(edit: RankCall, function: Callable[..., Any]) -> None:
    """Let a rank's call be ``function(axes, *arguments)``, along this axis and all that asked for the same before."""
    known = edit.target if isinstance(edit.target, AxisCollective) else None
    edit.target = AxisCollective(known.function, known.axes + 1) if known else AxisCollective(function)
    edit.prefix.insert(0, edit.axis)


def all_reduce_sum(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """The sum over all ranks of all axes, without a thought of gradients; ``x`` may be overwritten."""
    for axis in axes:
        x = axis.all_reduce(x.contiguous())
    return x


def all_reduce_max(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """The elementwise maximum over all ranks of all axes; ``x`` may be overwritten."""
    for axis in axes:
        x = axis.maximum(x.contiguous())
    return x


def all_reduce_bytes(elements: int, itemsize: int, degree: int, times: int) -> int:
    """What each rank sends for so many sums or maxima of ``elements`` over an axis."""
    return 2 * elements * itemsize * (degree - 1) * times // degree
