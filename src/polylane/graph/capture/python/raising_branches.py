"""Branches that only raise: ``if labels.max() >= n: raise ...`` becomes a check of every batch, on the other branch.

Export cannot tell which way such a branch goes. Where one of its two ways does nothing but raise, the other one is
followed, and the graph gets a node that looks at the condition in every forward pass and raises as the user's own code
would. Which way only raises is read off the bytecode of the function that asked:

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from polylane.errors import PolylaneError
from polylane.graph.capture.python.python_operators import emit_check
from polylane.graph.python_state.own_objects import is_users

_RAISED = "_polylane_raised"
_MOST_STEPS = 400  # instructions of a branch that are followed
_EXPORT = "polylane.graph.capture.export"  # whose frames belong to who calls the loss
_KEPT = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class RaiseOnly:
    """A question of which one answer does nothing but raise.

    Attributes:
        answer: the other answer, with which the code goes on.
        at: "file:line" of the statement that raises.
        words: the raised expression, or the message of an assertion; None where its source is not at hand.
        is_assertion: whether it is an ``assert``.
        names: globals and locals that the expression reads; tensors among them are left out.
    """

    answer: bool
    at: str
    words: CodeType | None
    is_assertion: bool
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class BatchCheck:
    """A node of the graph that raises where the user's code would have.

    Attributes:
        raised: what is raised, and at which answer.
        tensor_names: names of the tensors after the condition, of which the words may tell.
        numbers: how many of these, the last ones, the user's code reads as numbers.
    """

    raised: RaiseOnly
    tensor_names: tuple[str, ...] = ()
    numbers: int = 0

    __name__ = "check"
    __module__ = "polylane"

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return []

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        condition = tensors[0]
        if (
            not condition.is_meta
            and not isinstance(condition, FakeTensor)
            and bool(condition) is not self.raised.answer
        ):
            raise PolylaneError(f"loss(model, batch) fails on this batch: {self._tell(tensors[1:])} ({self.raised.at})")
        return []

    def _tell(self, tensors: Sequence[Tensor]) -> str:
        """Return the name and the words of what the user's code raises, on one line."""
        raised = self.raised
        if raised.words is None:
            return "a check of it does not hold"
        offset = len(tensors) - self.numbers
        values = [*tensors[:offset], *(tensor.item() for tensor in tensors[offset:])]
        names = {**raised.names, **dict(zip(self.tensor_names, values, strict=True))}
        try:
            exec(raised.words, names)
        except Exception:  # the words need a value that is not here
            return "a check of it does not hold"
        value = AssertionError(names[_RAISED]) if raised.is_assertion else names[_RAISED]
        kind = value if isinstance(value, type) else type(value)
        text = "" if isinstance(value, type) else " ".join(str(value).split())
        return f"{kind.__name__}: {text}" if text else kind.__name__


def hide_values(graph: fx.Graph, values: Collection[Any]) -> None:
    """Write "…" for some values into the words of a graph's checks: other batches carry others in their place.

    Args:
        graph: captured code; its checks are changed in place.
        values: what the captured batch carries and the loss does not read, such as names of files.
    """

    def hide(value: Any) -> Any:
        return "…" if any(value is hidden_value for hidden_value in values) else value

    for node in graph.nodes:
        if isinstance(node.target, BatchCheck):
            raised = node.target.raised
            node.target.raised = replace(raised, names={k: tree_map(hide, v) for k, v in raised.names.items()})


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


def check_condition(raised: RaiseOnly, condition: Tensor, numbers: Mapping[str, Tensor] | None = None) -> bool:
    """Write a check into the graph that is exported, and return the answer with which the code goes on.

    Args:
        raised: the branch that only raises.
        condition: what it asks, a tensor of one element.
        numbers: names that the words read, with the tensors that their numbers were taken out of.
    """
    tensors = {
        name: value for name, value in raised.names.items() if isinstance(value, Tensor) and _has_no_gradient(value)
    }
    numbers = numbers or {}
    check = BatchCheck(_without_tensors(raised), (*tensors, *numbers), len(numbers))
    emit_check(check, [condition, *tensors.values(), *numbers.values()])
    return raised.answer


def _has_no_gradient(value: Tensor) -> bool:
    """Return whether a value may be kept for the exception's words without keeping a graph of autograd alive."""
    return not value.requires_grad


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
    line = ends[raising[0]]
    assert line is not None
    words, is_assertion = _find_words(code.co_filename, line)
    read = {} if words is None else {name: _value_of(frame, name) for name in words.co_names}
    at_line = f"{code.co_filename}:{line}"
    return RaiseOnly(not raising[0], at_line, words, is_assertion, {k: v for k, v in read.items() if v is not _NONE})


_NONE: Any = object()


def _value_of(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name, _NONE))


def _without_tensors(raised: RaiseOnly) -> RaiseOnly:
    """Return the same without values of the export: tensors, and sizes that follow the batch."""
    names = {
        name: value
        for name, value in raised.names.items()
        if isinstance(value, (*_KEPT, torch.nn.Module, type)) or callable(value) or _is_plain(value)
    }
    return RaiseOnly(raised.answer, raised.at, raised.words, raised.is_assertion, names)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return not isinstance(value, (list, tuple, set)) or all(map(_is_plain, value))


# ---- bytecode --------------------------------------------------------------------------------------------------------


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


def _find_end(steps: list[dis.Instruction], index: Mapping[int, int], start: int) -> int | None:
    """Return the line of the first raise on the way if every path from an instruction on raises; else None."""
    waiting, visited, line = [start], set[int](), None
    while waiting:
        at = waiting.pop()
        while at not in visited:
            if at >= len(steps) or len(visited) > _MOST_STEPS:
                return None
            visited.add(at)
            step = steps[at]
            name = step.opname
            if name == "RAISE_VARARGS":
                raise_line = None if step.positions is None else step.positions.lineno
                line = raise_line if line is None else line
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
    return line


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
        return _value_of(frame, name.id)
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


# ---- source ----------------------------------------------------------------------------------------------------------


def _find_words(file: str, line: int) -> tuple[CodeType | None, bool]:
    """Return code that names what is raised at a line ``_RAISED``, and whether it is an assertion's message."""
    for block in _blocks(file):
        for i, node in enumerate(block):
            if isinstance(node, (ast.Raise, ast.Assert)) and node.lineno <= line <= (node.end_lineno or node.lineno):
                raised = node.exc if isinstance(node, ast.Raise) else node.msg or ast.Constant("")
                if raised is None:  # "raise" alone
                    return None, False
                assignment = ast.Assign([ast.Name(_RAISED, ast.Store())], raised)
                statements = [] if isinstance(node, ast.Assert) else _names_before(block[:i])
                module = ast.fix_missing_locations(ast.Module([*statements, assignment], []))
                return compile(module, file, "exec"), isinstance(node, ast.Assert)
    return None, False


def _names_before(block: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the last statements of a block that only give names, as a message that is written before."""
    tail = itertools.takewhile(lambda node: isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)), block[::-1])
    return list(tail)[::-1]


@functools.lru_cache(maxsize=64)
def _with_statements(file: str) -> list[ast.With]:
    return [node for node in _nodes(file) if isinstance(node, ast.With)]


@functools.lru_cache(maxsize=64)
def _blocks(file: str) -> list[list[ast.stmt]]:
    """Return all blocks of statements of a file."""
    bodies = [getattr(node, name, None) for node in _nodes(file) for name in ("body", "orelse", "finalbody")]
    return [block for block in bodies if isinstance(block, list)]


def _nodes(file: str) -> list[ast.AST]:
    """Return all of a file's syntax; nothing where the source is not at hand."""
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []
