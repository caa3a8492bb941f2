"""Views of guarded tensors: ``p.data.view(-1)``, ``p[0]``, ``for row in p``, which show and write what they view.

A worker may hold a part of a parameter, and a view of gathered values would show old ones after the next step, and
lose what is written to it. So a view remembers how it is taken: its values are those of the whole parameter at that
time, viewed alike, and a write is made on the whole, of which each worker takes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from polylane.runtime.guarded_tensors import Guard, guard_of, put_guard

_VIEWS = frozenset(
    """
    __getitem__ __iter__ T mT chunk diagonal expand expand_as flatten movedim narrow permute ravel reshape select split
    squeeze swapaxes t transpose unbind unflatten unfold unsqueeze view view_as
    """.split()  # noqa: SIM905
)


class ViewStep(NamedTuple):
    """One function that takes a view.

    Attributes:
        func: the function of torch that takes it.
        args: its arguments behind the tensor.
        kwargs: its arguments by name.
        position: of the view among the function's results; None: it is the result.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    position: int | None

    def take(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor."""
        result = self.func(tensor, *self.args, **self.kwargs)
        view: Tensor = result if self.position is None else result[self.position]
        return view


class ViewGuard(Guard):
    """Answers for a view of a guarded tensor.

    Args:
        source: the tensor that is viewed, which has a guard.
        steps: how the view is taken of its full value.
        shape: shape of the view.
    """

    is_view = True

    def __init__(self, source: Tensor, steps: tuple[ViewStep, ...], shape: torch.Size) -> None:
        guard = guard_of(source)
        assert guard is not None
        super().__init__(guard.name, guard.why, shape, reader=guard.reader)
        self.source, self.steps = source, steps

    def take(self, full_tensor: Tensor) -> Tensor:
        """Return the view of the source's whole value."""
        for step in self.steps:
            full_tensor = step.take(full_tensor)
        return full_tensor


class Values(Protocol):
    """Reads whole values."""

    def read_value(self, value: Any) -> Any:
        """Return the value of a guarded tensor."""


def view_guarded(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a function's result if it is a view, or are views, of its first argument, which is guarded; else None."""
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]
    guard = guard_of(args[0]) if args else None
    if name not in _VIEWS or guard is None or not all(map(_is_plain, (*args[1:], *kwargs.values()))):
        return None
    source, steps = (guard.source, guard.steps) if isinstance(guard, ViewGuard) else (args[0], ())
    func = Tensor.unbind if name == "__iter__" else func
    stand_in = torch.empty(guard_of(source).shape, dtype=source.dtype, device="meta")  # type: ignore[union-attr]
    for step in steps:
        stand_in = step.take(stand_in)
    result = func(stand_in, *args[1:], **kwargs)
    taken = result if isinstance(result, (tuple, list)) else [result]
    if not all(view._is_view() for view in taken):
        return None
    views = []
    for position, view in enumerate(taken):
        step = ViewStep(func, args[1:], kwargs, None if view is result else position)
        # Without memory: what it shows is found when it is asked for.
        handle = torch.empty((), dtype=source.dtype, device=source.device).expand(view.shape)
        put_guard(handle, ViewGuard(source, (*steps, step), view.shape))
        views.append(handle)
    if name == "__iter__":
        return iter(views)
    return views[0] if taken[0] is result else tuple(views)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or value is Ellipsis or isinstance(value, (int, slice, str, torch.dtype))


def write_whole(
    values: Values, tensor: Tensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Make a write that needs the whole of a guarded tensor, or is one on a view of it; collective.

    Args:
        values: reads the whole values of tensors.
        tensor: the guarded tensor that is written.
        func: the function that writes into its first argument.
        args: its arguments behind that, none of them guarded.
        kwargs: its arguments by name, the same.
    """
    guard = guard_of(tensor)
    source: Tensor = guard.source if isinstance(guard, ViewGuard) else tensor
    if (source_guard := guard_of(source)) is None:  # an alias of memory that the tensor has no more
        func(guard.take(source) if isinstance(guard, ViewGuard) else source, *args, **kwargs)
        return
    full_tensor = values.read_value(source).clone()
    target = guard.take(full_tensor) if isinstance(guard, ViewGuard) else full_tensor
    func(target, *args, **kwargs)
    if source_guard.cut is not None:
        source_guard.take_part(full_tensor)
    else:
        source.detach().copy_(full_tensor)
    if source is not tensor:
        source_guard.record_write(False)
        torch.autograd.graph.increment_version(source)
