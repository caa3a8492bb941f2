"""Branches that only raise: ``if labels.max() >= n: raise ...`` becomes a check of every batch, on the other branch.

Export cannot tell which way such a branch goes. Where one of its two ways does nothing but raise, the other one is
followed, and the graph gets a node that looks at the condition in every forward pass and names the user's statement
where that would raise. Which way only raises is read off the bytecode of the function that asked:

    LOAD condition; POP_JUMP_IF_FALSE ─▶ goes on        captured: this way
         └▶ LOAD ValueError; ...; RAISE_VARARGS          the check's: every path from here ends in a raise
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polylane.errors import PolylaneError
from polylane.graph.capture.python.python_operators import emit_check
from polylane.graph.python_state.own_objects import is_users

_MOST_STEPS = 400  # instructions of a branch that are followed
_EXPORT = "polylane.graph.capture.export"  # whose frames belong to who calls the loss


@dataclass(frozen=True)
class RaiseOnly:
    """A question of which one answer does nothing but raise.

    Attributes:
        answer: the other answer, with which the code goes on.
        at: "file:line" of the statement that raises.
        statement: its source on one line; empty where the source is not available.
    """

    answer: bool
    at: str
    statement: str


@dataclass(eq=False)
class BatchCheck:
    """A node of the graph that raises where the user's code would have.

    Attributes:
        raised: what is raised, and at which answer.
    """

    raised: RaiseOnly

    __name__ = "check"
    __module__ = "polylane"

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return []

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        (condition,) = tensors
        if (
            not condition.is_meta
            and not isinstance(condition, FakeTensor)
            and bool(condition) is not self.raised.answer
        ):
            statement = f"`{self.raised.statement}`" if self.raised.statement else "a statement that raises"
            raise PolylaneError(
                f"loss(model, batch) fails on this batch: it reaches {statement} ({self.raised.at}); correct the "
                "batch, or the condition of that line"
            )
        return []


# What asks a tensor for its truth, of one element or of all of them.
TRUTHS = frozenset(("__bool__", "is_nonzero", "item", "equal", "allclose"))


def answer_raising(name: str, args: Any, kwargs: Any, frame: FrameType) -> bool | None:
    """Answer a question about a tensor of which one answer only raises, and write the check into the graph.

    Args:
        name: of torch's function that asks, one of ``TRUTHS``.
        args, kwargs: its arguments, tensors of the export.
        frame: of the function that asked.
    """
    raised = find_raise(frame)
    if raised is None:
        return None
    condition = args[0]
    if name in ("equal", "allclose"):
        if condition.shape != args[1].shape:
            return False
        condition = (torch.isclose(*args, **kwargs) if name == "allclose" else condition == args[1]).all()
    return check_condition(raised, condition)


def check_condition(raised: RaiseOnly, condition: Tensor) -> bool:
    """Write a check into the graph that is exported, and return the answer with which the code goes on.

    Args:
        raised: the branch that only raises.
        condition: what it asks, a tensor of one element.
    """
    emit_check(BatchCheck(raised), [condition])
    return raised.answer


def find_raise(frame: FrameType, asking: int | None = None) -> RaiseOnly | None:
    """Return what the answer to a question is that does not raise, if the other one does nothing else.

    Args:
        frame: of the function that asks for the truth of a tensor.
        asking: number of the instruction that asks; default: the one that runs right now.
    """
    code = frame.f_code
    steps, index = _instructions(code)
    at = index.get(frame.f_lasti) if asking is None else asking
    jump = None if at is None else _jump_after(steps, at)
    if jump is None or _is_caught(frame):
        return None
    jump_answer = "IF_TRUE" in steps[jump].opname  # the answer with which it jumps
    target, following = index[steps[jump].argval], jump + 1
    ends = {jump_answer: _find_end(steps, index, target), not jump_answer: _find_end(steps, index, following)}
    raising = [answer for answer, end in ends.items() if end is not None]
    if len(raising) != 1:
        return None
    start_line, end_line = ends[raising[0]] or (0, 0)
    lines = [linecache.getline(code.co_filename, line).strip() for line in range(start_line, end_line + 1)]
    return RaiseOnly(not raising[0], f"{code.co_filename}:{start_line}", " ".join(lines))


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    steps = list(dis.get_instructions(code))
    return steps, {step.offset: i for i, step in enumerate(steps)}


def _jump_after(steps: list[dis.Instruction], at: int) -> int | None:
    """Return the branch that asked, or that follows at once on a call which asked (``bool(...)``, ``.item()``)."""
    for i in range(at, min(at + 4, len(steps))):
        name = steps[i].opname
        if name.startswith("POP_JUMP") and ("IF_TRUE" in name or "IF_FALSE" in name):
            return i
        # A call may be two instructions, and where it was made often enough the first of them does all of it.
        if (i == at and name in ("PRECALL", "TO_BOOL")) or (name.startswith("CALL") and i <= at + 1):
            continue
        if name not in ("TO_BOOL", "CACHE", "NOP", "COPY_FREE_VARS", "EXTENDED_ARG"):
            return None
    return None


def is_at_branch(frame: FrameType) -> bool:
    """Return whether a frame is at a branch itself, and not at a call that asks inside."""
    steps, index = _instructions(frame.f_code)
    at = index.get(frame.f_lasti)
    return at is not None and (steps[at].opname.startswith("POP_JUMP") or steps[at].opname == "TO_BOOL")


def is_compared_to_raise(frame: FrameType) -> bool:
    """Return whether a frame compares the number that it asks for right now, and one way from there only raises."""
    steps, index = _instructions(frame.f_code)
    at = index.get(frame.f_lasti, len(steps))
    positions = itertools.dropwhile(lambda i: steps[i].opname.startswith(_READS), range(at + 1, len(steps)))
    compare = next(positions, None)
    if compare is None or steps[compare].opname != "COMPARE_OP":
        return False
    return find_raise(frame, compare + 1) is not None


_READS = ("LOAD_", "PRECALL", "CALL", "CACHE", "BINARY_OP", "EXTENDED_ARG")


def _find_end(steps: list[dis.Instruction], index: Mapping[int, int], start: int) -> tuple[int, int] | None:
    """Return the lines of the first raise on the way if every path from an instruction on raises; else None."""
    waiting, visited, lines = [start], set[int](), None
    while waiting:
        at = waiting.pop()
        while at not in visited:
            if at >= len(steps) or len(visited) > _MOST_STEPS:
                return None
            visited.add(at)
            step = steps[at]
            name = step.opname
            if name == "RAISE_VARARGS":
                lines = lines or _lines_of(step)
                break
            if name.startswith(
                ("RETURN", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "RERAISE", "FOR_ITER")
            ):
                return None
            if "JUMP" in name:
                if "BACKWARD" in name:
                    return None
                waiting.append(index[step.argval])
                if name in ("JUMP_FORWARD", "JUMP"):
                    break
            at += 1
    return lines


def _lines_of(step: dis.Instruction) -> tuple[int, int] | None:
    """Return the first and the last line of an instruction's statement."""
    if step.positions is None or step.positions.lineno is None:
        return None
    return step.positions.lineno, step.positions.end_lineno or step.positions.lineno


def _is_caught(frame: FrameType | None) -> bool:
    """Return whether an ``except`` or a ``suppress`` of the user's surrounds what runs: then a raise is not the end."""
    while frame is not None and frame.f_globals.get("__name__") != _EXPORT:
        if is_users(frame.f_code.co_filename) and (_has_handler(frame.f_code, frame.f_lasti) or _is_suppressed(frame)):
            return True
        frame = frame.f_back
    return False


def _is_suppressed(frame: FrameType) -> bool:
    """Return whether a frame is inside of ``with contextlib.suppress(...)``, which is an ``except`` in other words."""
    line, statements = frame.f_lineno, _with_statements(frame.f_code.co_filename)
    outer_statements = [node for node in statements if node.body[0].lineno <= line <= (node.end_lineno or line)]
    managers = [item.context_expr for node in outer_statements for item in node.items]
    return any(isinstance(call, ast.Call) and _resolve(call.func, frame) is contextlib.suppress for call in managers)


def _resolve(name: ast.expr, frame: FrameType) -> Any:
    """Return what a name with dots stands for in a frame; None where that is not known."""
    if isinstance(name, ast.Name):
        return frame.f_locals.get(name.id, frame.f_globals.get(name.id))
    return getattr(_resolve(name.value, frame), name.attr, None) if isinstance(name, ast.Attribute) else None


def _has_handler(code: CodeType, at: int) -> bool:
    entries: Any = getattr(dis.Bytecode(code), "exception_entries", ())
    steps, index = _instructions(code)
    for entry in entries:
        if entry.start <= at < entry.end and entry.target in index:
            begin = index[entry.target]
            # A handler of "with" calls __exit__, one of "finally" raises again: neither asks what was raised.
            if any(step.opname == "CHECK_EXC_MATCH" for step in steps[begin : begin + 12]):
                return True
    return False


@functools.lru_cache(maxsize=64)
def _with_statements(file: str) -> list[ast.With]:
    """Return all ``with`` statements of a file; nothing where its source is not available."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # the file was edited since it was imported
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.With)]


class AbsentValues(TorchFunctionMode):
    """Mode under which a question to a tensor on the meta device is answered where the other answer only raises.

    No batch that can be trained on takes such a branch, so that a prediction goes on as if none were. The graph has its
    checks all the same, for export writes them.
    """

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
