"""Values that follow from constants alone, known while a model is exported: Python may ask for them.

Export knows no tensor's numbers, so that ``if mask.all()`` cannot be followed, not even where the mask was written
down by the user's code: a causal mask, the columns of a table that are categories. Such tensors are computed as they
are made, beside what export records of them, and questions about them are answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# What Python asks of a tensor's numbers.
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__contains__")
_QUESTIONS = frozenset((*_CONVERSIONS, "item", "tolist", "is_nonzero", "equal", "allclose"))
_MOST_ELEMENTS = 1 << 22  # larger tensors are not computed


class KnownValues(TorchFunctionMode):
    """Mode under which questions about tensors that follow from constants alone are answered during export."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._written: dict[int, Tensor] = {}  # constants that the code writes: unknown from then on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        known = self._known_arguments(args, kwargs)
        if name in _QUESTIONS and known is not None:
            return _compute(func, *known)
        result = func(*args, **kwargs)
        written = _written_arguments(name, args, kwargs)
        if written and (known is None or any(not isinstance(each, FakeTensor) for each in written)):
            self._forget(written)
        elif known is not None and name not in _QUESTIONS and (written or _has_tensors(result)):
            self._keep(result, func, known)
        return result

    def _known_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with tensors as they are known; None if one is not, or a size is left open."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
                return None
            if isinstance(leaf, Tensor) and self._find(leaf) is None:
                return None
        found: tuple[Any, Any] = tree_map(lambda v: self._find(v) if isinstance(v, Tensor) else v, (args, kwargs))
        return found

    def _find(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            # Export makes parameters, buffers and inputs fake: what is not is a constant of the user's code.
            free = isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta
            return None if free or id(tensor) in self._written else tensor
        found = self._values.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _keep(self, result: Any, func: Any, known: tuple[Any, Any]) -> None:
        if sum(each.numel() for each in _tensors(result)) > _MOST_ELEMENTS:
            return
        try:
            value = _compute(func, *known)
        except Exception:  # drawn at random, or another limit: unknown
            return
        for each, of in zip(_tensors(result), _tensors(value), strict=False):
            if isinstance(each, FakeTensor) and tuple(each.shape) == tuple(of.shape):
                self._values[id(each)] = weakref.ref(each), of

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget tensors, and all that share memory with them."""
        self._written |= {id(each): each for each in tensors if not isinstance(each, FakeTensor)}
        lost = {of.untyped_storage().data_ptr() for each in tensors if (of := self._find(each)) is not None}
        kept = self._values.items()
        self._values = {key: of for key, of in kept if of[1].untyped_storage().data_ptr() not in lost}


class _Drawn(Exception):
    """An operator draws random numbers."""


class _WithoutRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Drawn
        return func(*args, **(kwargs or {}))


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on numbers, out of export's sight."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), cast(Any, _WithoutRandom)():
        return func(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and bool(_tensors(value)))


def _written_arguments(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a function writes in place."""
    in_place = name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    first = [args[0]] if in_place and args and isinstance(args[0], Tensor) else []
    return first + _tensors(kwargs.get("out"))
