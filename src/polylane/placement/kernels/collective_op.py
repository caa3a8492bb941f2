"""Operators with collectives inside: one function over all mesh axes that shard what it reduces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from polylane.placement.placement import Placement
from polylane.placement.redistribute import Axis
from polylane.placement.strategy import OperatorCall, RankCall, Strategy


class AxisCollective:
    """An operator of a rank's graph that communicates along axes: ``across(axis, ..., *arguments)``.

    Args:
        function: the implementation, called as ``function(axes, *arguments)``.
        axes: number of leading arguments that are axes.
    """

    __module__ = "polylane"

    def __init__(self, function: Callable[..., Any], axes: int = 1) -> None:
        self.function, self.axes = function, axes
        self.__name__ = str(getattr(function, "__name__", "across"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(args[: self.axes], *args[self.axes :], **kwargs)


def call_along_axis(edit: RankCall, function: Callable[..., Any]) -> None:
    """Make a rank's call ``function(axes, *arguments)``, over this axis and all that made it so before."""
    # The second axis that shards the same reduction is added to the axes of the first one's function.
    collective = edit.target if isinstance(edit.target, AxisCollective) else None
    edit.target = AxisCollective(collective.function, collective.axes + 1) if collective else AxisCollective(function)
    edit.prefix = [edit.axis, *edit.prefix]


def collective_strategy(
    call: OperatorCall,
    name: str,
    inputs: Mapping[int, Placement],
    outputs: Placement | Sequence[Placement],
    function: Callable[..., Any],
    *,
    rows: int,
    sums: int,
    messages: int,
) -> Strategy:
    """Return a strategy whose ranks call ``function(axes, *arguments)``, which all-reduces ``sums`` values a row."""
    size = max(call.outputs[0].dtype.itemsize, 4)  # summed in float32 at least
    sent = all_reduce_bytes(rows, size, call.degree, sums)
    local = partial(call_along_axis, function=function)
    return call.strategy(name, inputs, outputs, local=local, sent=sent, messages=messages)


def all_reduce_sum(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """Return the sum over all ranks of all axes; not differentiable, and ``x`` may be overwritten."""
    for axis in axes:
        x = axis.all_reduce(x.contiguous())
    return x


def all_reduce_max(axes: Sequence[Axis], x: Tensor) -> Tensor:
    """Return the elementwise maximum over all ranks of all axes; ``x`` may be overwritten."""
    for axis in axes:
        x = axis.maximum(x.contiguous())
    return x


def all_reduce_bytes(elements: int, itemsize: int, degree: int, times: int) -> int:
    """Return the bytes that each rank sends for ``times`` all-reduces of ``elements`` over an axis (ring algorithm)."""
    return 2 * elements * itemsize * (degree - 1) * times // degree
