"""Values that follow from constants alone, known while a model is exported: Python may ask for them.

Export knows no tensor's numbers, so that ``if mask.all()`` cannot be followed, not even where the mask was written
down by the user's code: a causal mask, the columns of a table that are categories. Such tensors are computed as they
are made, beside what export records of them, and questions about them are answered. So are tensors that follow from
the batch, where a tape (:mod:`polylane.graph.capture.questions.tape`) records the questions.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from polylane.graph.capture.python.asked_numbers import AskedNumbers
from polylane.graph.capture.python.drawn_functions import tensor_of_drawn
from polylane.graph.capture.python.export_repairs import without_absent_generator
from polylane.graph.capture.python.raising_branches import TRUTHS, answer_raising, is_compared_to_raise
from polylane.graph.capture.questions.tape import BatchTape
from polylane.graph.nodes.memory import storage_id
from polylane.graph.readings.asked_draws import is_asked_draw

# What Python asks of a tensor's numbers.
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__contains__")
_QUESTIONS = frozenset((*_CONVERSIONS, "item", "tolist", "is_nonzero", "equal", "allclose"))
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST_ELEMENTS = 1 << 22  # larger tensors are not computed


class KnownValues(TorchFunctionMode):
    """Mode under which questions about tensors that follow from constants alone are answered during export.

    Args:
        tape: takes down questions about tensors that follow from the batch; None: these are not answered.
        leaves: flat leaves of the batch under export.
        numbers: records the tensors out of which numbers are taken that stay symbols; None: they are not recorded.
    """

    def __init__(
        self, tape: BatchTape | None = None, leaves: Sequence[Any] = (), numbers: AskedNumbers | None = None
    ) -> None:
        super().__init__()
        self._tape, self._numbers = tape, numbers
        pairs = [] if tape is None else tape.start(leaves)
        self._values = {id(tensor): (weakref.ref(tensor), value) for tensor, value in pairs}
        self._written: dict[int, Tensor] = {}  # constants that the code writes: unknown from then on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = without_absent_generator(kwargs or {}), getattr(func, "__name__", "")
        drawn = tensor_of_drawn(func, args, kwargs)
        if drawn is not None:
            return drawn
        values = self._known_arguments(args, kwargs)
        if name in _QUESTIONS:
            answer = self._answer(func, values, args, kwargs, sys._getframe(1))
            if answer is not None:
                return answer
        result = func(*args, **kwargs)
        if self._tape is not None and is_asked_draw(func, result):
            self._values[id(result)] = weakref.ref(result), self._tape.draw(name, result)
            return result
        if name == "item" and self._numbers is not None:
            self._numbers.learn(result, args[0])
        written = _written_arguments(name, args, kwargs)
        if written and (values is None or not self._may_write(written)):
            self._forget(written)
        elif values is not None and name not in _QUESTIONS and (written or _has_tensors(result)):
            self._keep(
                result,
                func,
                values,
                self._encoded(args, kwargs),
                [v for v in map(self._find, written) if v is not None],
            )
        return result

    def _answer(self, func: Any, values: tuple[Any, Any] | None, args: Any, kwargs: Any, frame: FrameType) -> Any:
        """Answer what Python asks of tensors; None if export is to tell that it does not know.

        Args:
            func: torch's function or method that asks, such as ``Tensor.item``.
            values: its arguments with tensors as they are known, or None.
            args, kwargs: its arguments, tensors of the export.
            frame: of the function that asks.
        """
        answer, name = None if values is None else _compute(func, *values), getattr(func, "__name__", "")
        arguments = self._encoded(args, kwargs)
        of_batch = values is not None and self._tape is not None and self._tape.depends_on_batch(arguments)
        if values is not None and not of_batch:
            return answer
        # A check of what only raises needs no question to the whole batch ahead of its step.
        going_on = answer_raising(name, args, kwargs, frame) if name in TRUTHS else None
        if going_on is None and name == "item" and self._numbers is not None and is_compared_to_raise(frame):
            return None
        if going_on is None and of_batch and self._tape is not None and self._tape.answer(func, arguments, answer):
            return answer
        return going_on

    def _known_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with tensors as they are known; None if one is not, or a size is left open."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator) or (isinstance(leaf, _SIZES) and self._number_of(leaf) is None):
                return None
            if isinstance(leaf, Tensor) and self._find(leaf) is None:
                return None

        def known(leaf: Any) -> Any:
            return self._find(leaf) if isinstance(leaf, Tensor) else self._number_of(leaf)

        pair: tuple[Any, Any] = tree_map(lambda v: known(v) if isinstance(v, (Tensor, *_SIZES)) else v, (args, kwargs))
        return pair

    def _may_write(self, written: Sequence[Tensor]) -> bool:
        """Return whether tensors stay known when something known is written into them."""
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            return False
        if self._tape is None:
            return True
        # What was a constant follows from the batch, perhaps, from now on; others that share its memory would not.
        constants = [
            value for tensor in written if (value := self._find(tensor)) is not None and not self._tape.knows(value)
        ]
        shared = [storage_id(value) for _, value in self._values.values()]
        if any(shared.count(storage_id(value)) > 1 for value in constants):
            return False
        for value in constants:
            self._tape.adopt(value)
        return True

    def _number_of(self, size: Any) -> Any:
        return None if self._tape is None else self._tape.number_of(size)

    def _encoded(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with tensors as they are known, and sizes as they are."""
        pair: tuple[Any, Any] = tree_map(lambda v: self._find(v) if isinstance(v, Tensor) else v, (args, kwargs))
        return pair

    def _find(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            # Export makes parameters, buffers and inputs fake: what is not is a constant of the user's code.
            free = isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_meta
            return None if free or id(tensor) in self._written else tensor
        entry = self._values.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _keep(self, result: Any, func: Any, values: tuple[Any, Any], encoded: Any, written: Sequence[Tensor]) -> None:
        if self._tape is None and sum(tensor.numel() for tensor in _tensors(result)) > _MOST_ELEMENTS:
            return
        try:
            value = _compute(func, *values)
        except Exception:  # drawn at random, or another limit: unknown
            return
        pairs = list(zip(_tensors(result), _tensors(value), strict=False))
        if self._tape is not None:
            if not all(isinstance(tensor, FakeTensor) and self._tape.has_size(tensor, of) for tensor, of in pairs):
                return
            self._tape.record(func, encoded, pairs, written)
        for tensor, of in pairs:
            if isinstance(tensor, FakeTensor) and (self._tape is not None or tuple(tensor.shape) == tuple(of.shape)):
                self._values[id(tensor)] = weakref.ref(tensor), of

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget tensors, and all that share memory with them."""
        self._written |= {id(tensor): tensor for tensor in tensors if not isinstance(tensor, FakeTensor)}
        lost = {storage_id(of) for tensor in tensors if (of := self._find(tensor)) is not None}
        entries = self._values.items()
        self._values = {key: of for key, of in entries if storage_id(of[1]) not in lost}


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
    tensors = [args[0]] if in_place and args and isinstance(args[0], Tensor) else []
    return tensors + _tensors(kwargs.get("out"))
