"""Questions to tensors without data: a model on the meta device is run past branches that only raise.

No such branch is taken by a batch that can be trained on, so that a prediction goes on as if none were. The graph has
their checks all the same, for export writes them (:mod:`polylane.graph.capture.python.raising_branches`).
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polylane.graph.capture.python.raising_branches import TRUTHS, find_raise, is_at_branch


class AbsentValues(TorchFunctionMode):
    """Mode under which a question to a tensor on the meta device is answered where the other answer only raises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in TRUTHS and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            raised = find_raise(sys._getframe(1))
            if raised is not None:
                return raised.answer
            if name == "item":
                return _MetaNumber()
        return func(*args, **(kwargs or {}))


# Where torch refuses one of these, it names the type: that it is of the meta device tells why.
class _MetaNumber:
    """A number that nobody knows; also what is computed of it. It may be compared, where one answer only raises."""

    def _compute(self, *operands: Any) -> Any:
        return self if all(isinstance(operand, (int, float, _MetaNumber)) for operand in operands) else _ask()

    def _compare(self, other: Any) -> Any:
        return _MetaAnswer()

    def _convert(self, *arguments: Any) -> Any:
        return _ask()

    __abs__ = __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _compute
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _compute
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare
    __bool__ = __int__ = __float__ = __index__ = __round__ = __str__ = __repr__ = __format__ = __hash__ = _convert


class _MetaAnswer:
    """The answer to a comparison of such a number."""

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        raised = find_raise(frame) if is_at_branch(frame) else None
        return _ask() if raised is None else raised.answer


def _ask() -> NoReturn:
    raise RuntimeError("a number of a tensor on the meta device is asked for")
