"""Numbers that Python takes out of tensors (``x.max().item()``) to compare them: what only raises becomes a check.

Under export such a number is a symbol. A branch on a condition of symbols cannot be followed; where one of its ways
does nothing but raise, the same condition is computed of the tensors that the numbers were taken from, and checked in
every forward pass (:mod:`polylane.graph.capture.python.raising_branches`):

    largest = labels.max().item()          u0, of the tensor labels.max()
    if largest >= 10: raise ValueError     check: labels.max() >= 10; captured with the answer False
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from sympy.logic.boolalg import Boolean  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from polylane.graph.capture.python.raising_branches import check_condition, find_raise, is_at_branch
from polylane.graph.python_state.own_objects import is_users
from polylane.graph.symbolic_sizes import number_function

_NUMBERS = (torch.SymInt, torch.SymFloat)


class AskedNumbers:
    """The symbols that stand for numbers taken out of tensors during one export."""

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}  # by symbol

    def learn(self, number: Any, tensor: Tensor) -> None:
        """Note which tensor a number was taken out of, if it is a symbol.

        Args:
            number: what ``tensor.item()`` returned under export.
            tensor: a tensor of one element, of the export.
        """
        if isinstance(number, _NUMBERS):
            symbol = sympy.sympify(number.node.expr)
            if symbol.is_Symbol:
                self._tensors[symbol] = tensor.detach()

    @contextmanager
    def branches_checked(self) -> Iterator[None]:
        """Context manager: inside, branches on these numbers of which one way only raises become checks."""
        original = ShapeEnv.evaluate_expr

        def evaluate(env: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(env, expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:  # torch cannot decide it from sizes: a number of the data is asked for
                answer = self._check(sympy.sympify(expr))
                if answer is None:
                    raise
                return sympy.sympify(answer)

        with patch.object(ShapeEnv, "evaluate_expr", evaluate):
            yield

    def _check(self, expr: Any) -> bool | None:
        """Write the check of a condition into the graph; return the answer with which the code goes on, or None."""
        frame = _users_frame()
        is_known = expr.free_symbols <= self._tensors.keys()
        if frame is None or not (is_known and isinstance(expr, Boolean) and is_at_branch(frame)):
            return None
        raised = find_raise(frame)
        condition = None if raised is None else self._compute(expr)
        if raised is None or condition is None:
            return None
        return check_condition(raised, condition)

    def _compute(self, expr: Any) -> Tensor | None:
        """Return a condition on numbers as a tensor; None where it is no formula that tensors can follow."""
        symbols = sorted(expr.free_symbols, key=str)
        # As Python compares numbers: a real one has 64 bits.
        exact = [_widen(self._tensors[symbol]).reshape(()) for symbol in symbols]
        try:
            condition = number_function(expr, symbols)(*exact)
        except Exception:  # a formula of functions that take no tensors
            return None
        return condition if isinstance(condition, Tensor) else None


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _users_frame() -> FrameType | None:
    """Return the user's innermost frame that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
