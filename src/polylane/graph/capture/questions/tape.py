"""Record of what a loss computes of its batch alone while it is exported, and of the questions that it asks of that."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from polylane.graph.nodes.memory import storage_id
from polylane.graph.python_state.own_objects import is_users
from polylane.graph.readings.asked_draws import AskedDraw, StepDraws
from polylane.graph.readings.batch_readings import Answer, Reading, ReadingStep, SizeRead, Slot
from polylane.graph.symbolic_sizes import number_function

_SYMBOLIC_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class BatchTape:
    """The tensors that one export computed of a batch alone, with their values, and the questions asked of them.

    Args:
        leaves: flat leaves of the batch that is exported, with data.
        draws: numbers of the step for which it is exported; None: for no one.

    Attributes:
        readings: the questions so far, each with its answer.
    """

    def __init__(self, leaves: Sequence[Any], draws: StepDraws | None = None) -> None:
        self._given, self._draws = leaves, draws
        self.start([])

    def start(self, stand_ins: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Begin a run of the loss; return what stands for each tensor of the batch under export, with a copy of it.

        Args:
            stand_ins: flat leaves under export, without data.
        """
        self.readings: list[Reading] = []
        self._drawn = 0  # single numbers that torch was asked to draw so far
        self._steps: list[ReadingStep] = []
        self._values: list[Tensor] = []  # by slot; kept, so that no two have one address
        self._slots: dict[int, int] = {}  # by the id of the value
        self._leaves: dict[int, int] = {}
        self._places: dict[Any, tuple[int, int]] = {}  # by symbol, the tensor's slot and the dimension that it is
        self._numbers: dict[Any, Any] = {}  # by symbol, its value in this batch
        pairs = []
        for i, stand_in in enumerate(stand_ins):
            if isinstance(stand_in, Tensor):
                value = _copy(self._given[i])
                slot = self._add(value)
                self._leaves[slot] = i
                self._learn_sizes(stand_in, value, slot)
                pairs.append((stand_in, value))
        return pairs

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def number_of(self, size: Any) -> Any | None:
        """Return a symbolic size as the number that it is in this batch; None where it is not known."""
        expr = _expression(size)
        if not expr.free_symbols <= self._numbers.keys():
            return None
        return self._evaluate(expr)

    def depends_on_batch(self, arguments: Any) -> bool:
        """Return whether an argument is a tensor of the batch or a size, and not only constants."""
        return any(
            isinstance(leaf, _SYMBOLIC_NUMBERS) or (isinstance(leaf, Tensor) and id(leaf) in self._slots)
            for leaf in tree_leaves(arguments)
        )

    def knows(self, value: Tensor) -> bool:
        """Return whether a value is one of the tape's, and no constant."""
        return id(value) in self._slots

    def adopt(self, value: Tensor) -> None:
        """Take a constant among the tape's tensors, before something is written into it."""
        self._steps.append(ReadingStep(torch.clone, ((_copy(value),), {}), (self._add(value),)))

    def draw(self, kind: str, stand_in: Tensor) -> Tensor:
        """Record a call of torch that draws a single random number, and return the step's number.

        Args:
            kind: name of torch's function.
            stand_in: what it returned under export.
        """
        draw = AskedDraw(kind, self._drawn, tuple(stand_in.shape), stand_in.dtype)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = draw(self._draws)
        self._drawn += 1
        self._steps.append(ReadingStep(draw, ((), {}), (self._add(value),)))
        return value

    def has_size(self, stand_in: Tensor, value: Tensor) -> bool:
        """Return whether a tensor under export may have the sizes of a value; sizes that the data decide may."""
        if stand_in.dim() != value.dim():
            return False
        for size, number in zip(stand_in.shape, value.shape, strict=True):
            if isinstance(size, torch.SymInt):
                expr = _expression(size)
                fresh = expr.free_symbols - self._numbers.keys()
                if not (fresh and expr.is_Symbol) and self.number_of(size) != number:
                    return False
            elif size != number:
                return False
        return True

    def record(
        self, function: Any, arguments: Any, results: Sequence[tuple[Tensor, Tensor]], written: Sequence[Tensor]
    ) -> None:
        """Record a call.

        Args:
            function: torch's function or method that was called.
            arguments: its (args, kwargs), tensors as their values and sizes symbolic.
            results: tensors that it returned under export, with their values.
            written: values of those of its arguments that it writes into.
        """
        if not self.depends_on_batch(arguments):
            return
        slots = tuple(self._add(value) for _, value in results)
        self._steps.append(
            ReadingStep(function, self._encode(arguments), slots, tuple(self._slots[id(value)] for value in written))
        )
        for (stand_in, value), slot in zip(results, slots, strict=True):
            self._learn_sizes(stand_in, value, slot)

    def _add(self, value: Tensor) -> int:
        if id(value) in self._slots:  # what is written in place is returned
            return self._slots[id(value)]
        self._values.append(value)
        self._slots[id(value)] = len(self._values) - 1
        return len(self._values) - 1

    def _learn_sizes(self, stand_in: Tensor, value: Tensor, slot: int) -> None:
        for dim, (size, number) in enumerate(zip(stand_in.shape, value.shape, strict=True)):
            if isinstance(size, torch.SymInt):
                for symbol in {_expression(size), sympy.sympify(size.node._expr)}:
                    if symbol.is_Symbol and symbol not in self._places:
                        self._places[symbol], self._numbers[symbol] = (slot, dim), sympy.Integer(number)

    def _encode(self, arguments: Any) -> Any:
        def encode(leaf: Any) -> Any:
            if isinstance(leaf, _SYMBOLIC_NUMBERS):
                return self._size_read(_expression(leaf))
            if not isinstance(leaf, Tensor):
                return leaf
            at = self._slots.get(id(leaf))
            return _copy(leaf) if at is None else Slot(at)  # a constant, as it is now

        return tree_map(encode, arguments)

    def _size_read(self, expr: Any) -> SizeRead:
        symbols = sorted(expr.free_symbols, key=str)
        return SizeRead(str(expr), number_function(expr, symbols), tuple(self._places[symbol] for symbol in symbols))

    def _evaluate(self, expr: Any) -> Any:
        symbols = sorted(expr.free_symbols, key=str)
        return number_function(expr, symbols)(*(int(self._numbers[symbol]) for symbol in symbols))

    # ---- questions ---------------------------------------------------------------------------------------------------

    def answer(self, function: Any, arguments: Any, answer: Any) -> bool:
        """Record a question with its answer; return False for one whose answers are too many to capture each of them.

        Args:
            function: the method that asks ("__bool__", "item").
            arguments: its (args, kwargs), tensors as their values.
            answer: what this batch answers.
        """
        if not isinstance(answer, (bool, int)):  # a real number, or several numbers: other ones in every batch
            return False
        self._ask(ReadingStep(function, self._encode(arguments), ()), answer)
        return True

    def answer_size(self, expr: Any) -> Answer | None:
        """Return what a condition on sizes that the data decide is in this batch, and record the question; or None."""
        expr = sympy.sympify(expr)
        if not expr.free_symbols or not expr.free_symbols <= self._places.keys():
            return None
        value = self._evaluate(expr)
        answer: Answer = bool(value) if expr.is_Boolean or isinstance(value, bool) else int(value)
        self._ask(self._size_read(expr), answer)
        return answer

    def _ask(self, question: ReadingStep | SizeRead, answer: Answer) -> None:
        steps, leaves = self._find_steps(question)
        reading = Reading(leaves, steps, question, answer, _find_line())
        # A condition on a size is looked at many times, and is one question.
        if not (isinstance(question, SizeRead) and any(entry.question == question for entry in self.readings)):
            self.readings.append(reading)

    def _find_steps(self, question: ReadingStep | SizeRead) -> tuple[tuple[ReadingStep, ...], dict[int, int]]:
        """Return the calls that lead to a question, in order, and the leaves of the batch that they read."""
        needed = {self._storage(slot) for slot in _slots_of(question)}
        steps = list[ReadingStep]()
        for step in reversed(self._steps):
            reads = {self._storage(slot) for slot in _slots_of(step)}
            if {self._storage(slot) for slot in (*step.results, *step.written)} & needed:
                steps.append(step)
                needed |= reads
        read = {slot for step in (*steps, question) for slot in _slots_of(step)}
        return tuple(reversed(steps)), {slot: leaf for slot, leaf in self._leaves.items() if slot in read}

    def _storage(self, slot: int) -> int:
        return storage_id(self._values[slot])


def _slots_of(step: ReadingStep | SizeRead) -> set[int]:
    leaves = [step] if isinstance(step, SizeRead) else tree_leaves(step.arguments)
    slots = {leaf.number for leaf in leaves if isinstance(leaf, Slot)}
    return slots | {number for leaf in leaves if isinstance(leaf, SizeRead) for number, _ in leaf.places}


def _copy(value: Tensor) -> Tensor:
    """Return a copy of a tensor with data, out of export's sight."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return value.detach().clone()


def _expression(size: Any) -> Any:
    return sympy.sympify(size.node.expr)


def _find_line() -> str:
    """Return the user's innermost line that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextmanager
def sizes_answered(tape: BatchTape | None) -> Iterator[None]:
    """Context manager: evaluate conditions on sizes that the data decide for the example batch, as far as it is known.

    Args:
        tape: what is known of the batch; None: nothing, and torch raises its error.
    """
    if tape is None:
        yield
        return
    original = ShapeEnv.evaluate_expr

    def evaluate(env: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(env, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:  # torch cannot decide it from sizes: it is computed from the batch
            answer = tape.answer_size(expr)
            if answer is None:
                raise
            return sympy.sympify(answer)

    with patch.object(ShapeEnv, "evaluate_expr", evaluate):
        yield
