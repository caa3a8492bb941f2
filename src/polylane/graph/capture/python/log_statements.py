"""Log statements: lines of a loss that only note something for the user, such as ``history.append(loss.item())``.

Nothing of a step reads what they write. So they are cut out of the loss before it is captured, and run once a step,
with the loss of the whole batch, however many replicas and microbatches have computed it. Which statements these are is
found in the function's source: those outside of the slice of the value that it returns (Weiser, "Program Slicing",
1981). A log statement reads nothing local but the loss and what other log statements assign, and nothing that it may
write can be reached from the model, the optimizer or the rest of the loss.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dis
import io
import logging
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from polylane.errors import PolylaneError, describe_error
from polylane.graph.capture.python.function_source import build_function, read_definition
from polylane.graph.python_state.own_objects import (
    MISSING,
    MOST_VALUES,
    PLAIN,
    children_of,
    file_of,
    innermost_line,
    is_project_file,
    names_in_code,
)
from polylane.graph.python_state.state import PythonName, find_python_names

# What a log statement may not mention: later, a clock tells another time, and random numbers come in another order;
# what reaches names or gradients by other ways is no log.
_UNMOVABLE = {
    *("time", "datetime", "perf_counter", "monotonic", "random", "seed", "manual_seed", "backward", "autograd", "grad"),
    *("register_hook", "param_groups", "get_last_lr", "exec", "eval", "locals", "globals", "vars", "setattr"),
    *("delattr", "exit", "quit", "breakpoint"),
}
# Of the loss itself, what gives a number, or a tensor that nothing here writes into.
_OF_LOSS = {"item", "detach", "cpu", "tolist", "clone", "float", "double", "shape", "dtype", "device"}
# Of torch, what has no settings and draws nothing.
_OF_TORCH = {"no_grad", "inference_mode", "isnan", "isinf", "isfinite", "exp", "log", "sqrt", "Tensor"}
_REFUSED = (
    *(ast.Return, ast.Raise, ast.Assert, ast.Yield, ast.YieldFrom, ast.Await, ast.Import, ast.ImportFrom),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Delete, ast.Global, ast.Nonlocal),
)
# What a step itself changes, or trains: who has one of these may do anything to the step.
_TRAINED = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.Generator)
# Files are state that no name shows: what one writes, the other may read.
_WRITES_FILES = {
    *("open", "write_text", "write_bytes", "dump", "save", "savez", "touch", "mkdir", "unlink", "remove", "rename"),
}
_READS_FILES = {"open", "read_text", "read_bytes", "load", "exists", "isfile", "is_file", "stat", "getmtime", "listdir"}
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, logging.Logger, io.IOBase)


@dataclass(frozen=True)
class LossLog:
    """The log statements of a loss.

    Attributes:
        function: runs them; takes the loss, a scalar tensor.
        places: the names that they can reach in Python, some of which they write.
        reads_loss: whether they read the loss, which has to be waited for.
        source: where the first of them is, "file:line".
        loss: the user's loss, with them.
    """

    function: Callable[[Tensor], None]
    places: tuple[PythonName, ...]
    reads_loss: bool
    source: str
    loss: Callable[..., Any]

    def describe(self) -> str:
        """Return a note for the user."""
        return (
            f"{self.source} only notes something: such lines run once a step, after it, with the loss of the whole "
            "batch, and print on one worker"
        )

    def run(self, read_loss: Callable[[], float], dtype: torch.dtype, prints: bool) -> None:
        """Run them.

        Args:
            read_loss: returns the loss of the whole batch; it is called, and waits, only where they read it.
            dtype: the dtype that the user's loss returns.
            prints: whether what they print is to be seen: on one of several workers.

        Raises:
            PolylaneError: one of them raised; it names the user's line.
        """
        loss = torch.tensor(read_loss() if self.reads_loss else 0.0, dtype=dtype)
        with torch.no_grad(), contextlib.nullcontext() if prints else contextlib.redirect_stdout(io.StringIO()):
            try:
                self.function(loss)
            except Exception as error:
                line = innermost_line(
                    (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
                )
                raise PolylaneError(
                    f"a line of the loss that only notes something raised {describe_error(error)} ({line})"
                ) from error


def split_log_statements(loss: Any, model: nn.Module, other_functions: Sequence[Any]) -> tuple[Any, LossLog | None]:
    """Cut the log statements out of a loss.

    Args:
        loss: the user's loss, a function of (model, batch).
        model: the user's model, which must not read what is cut out.
        other_functions: what else runs in a step: factories of the optimizer and its scheduler, other losses.

    Returns:
        The loss without them, and the statements; the loss itself and None where it has none, or where it cannot be
        shown that nothing else reads what they write.
    """
    if not isinstance(loss, types.FunctionType) or not is_project_file(loss.__code__.co_filename):
        return loss, None
    definition = read_definition(loss)
    statements = () if definition is None else _find_log_statements(definition, loss)
    if not statements:
        return loss, None
    assert definition is not None
    body = [statement for statement in definition.body if statement not in statements]
    name = _returned_name(definition)
    shared = [statement for statement in definition.body if isinstance(statement, ast.Global | ast.Nonlocal)]
    without = build_function(loss, definition, body)
    function = build_function(loss, definition, [*shared, *statements], name)
    places = tuple(find_python_names([], [function]))
    hooks = [hook for parameter in model.parameters() for hook in _hooks_of(parameter)]
    if _meets(places, function, find_python_names([*model.named_modules()], [without, *other_functions, *hooks])):
        return loss, None
    read = {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
    line = f"{loss.__code__.co_filename}:{min(statement.lineno for statement in statements)}"
    return without, LossLog(function, places, name in read, line, loss)


def _hooks_of(parameter: nn.Parameter) -> list[Any]:
    tables = (getattr(parameter, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for table in tables for hook in table.values()]


# ---- which statements ------------------------------------------------------------------------------------------------


def _returned_name(definition: ast.FunctionDef) -> str:
    """Return the name of the variable that a function returns at its end, assigned in one place; "" for no such."""
    last_statement = definition.body[-1]
    if not isinstance(last_statement, ast.Return) or not isinstance(last_statement.value, ast.Name):
        return ""
    name = last_statement.value.id
    stored = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == name]
    stored = [node for node in stored if not isinstance(node.ctx, ast.Load)]
    plain = [node for node in definition.body if isinstance(node, ast.Assign) and node.targets == stored]
    returns = [node for node in ast.walk(definition) if isinstance(node, ast.Return)]
    return name if len(stored) == len(plain) == len(returns) == 1 else ""


def _find_log_statements(definition: ast.FunctionDef, function: types.FunctionType) -> tuple[ast.stmt, ...]:
    """Return the statements of a function's own body that nothing computed in it depends on; () without effects."""
    name = _returned_name(definition)
    if not name or any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in ast.walk(definition)):
        return ()
    code = function.__code__
    arguments = {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
    is_it = [isinstance(statement, ast.Assign) and _stores(statement) == {name} for statement in definition.body]
    assigned = is_it.index(True)
    logs = [
        statement
        for i, statement in enumerate(definition.body)
        if i != assigned and _may_move(statement, name, function) and (i > assigned or name not in _loads(statement))
    ]
    variables = {*code.co_varnames, *code.co_cellvars} - arguments
    while True:  # each round takes out statements that the rest needs, or that need the rest
        body = [statement for statement in definition.body if statement not in logs]
        needed = {variable for statement in body for variable in _loads(statement)}
        stored_names = {variable for statement in logs for variable in _stores(statement)} & variables
        of_rest = {variable for statement in body for variable in _stores(statement)} - {name}
        kept_logs = [
            statement
            for statement in logs
            if not _loads(statement) & (arguments | of_rest)
            and not _stores(statement) & (needed | of_rest | {name} | arguments)
            and _loads(statement) & variables <= stored_names | {name}
        ]
        if kept_logs == logs:
            break
        logs = kept_logs
    # Between its assignment and its return nothing else may change the loss.
    if any(name in _loads(statement) for statement in definition.body[assigned + 1 : -1] if statement not in logs):
        return ()
    has_effect = any(_has_effect(statement, variables) for statement in logs)
    return tuple(logs) if has_effect else ()


def _loads(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads, those of ``name += 1`` among them."""
    nodes = list(ast.walk(statement))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return read | {e.target.id for e in nodes if isinstance(e, ast.AugAssign) and isinstance(e.target, ast.Name)}


def _stores(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns."""
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return names | {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}


def _has_effect(statement: ast.stmt, variables: Collection[str]) -> bool:
    """Return whether a statement may do more than to assign local variables."""
    calls = any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return calls or not _stores(statement) <= set(variables) or _writes_inside(statement)


def _writes_inside(statement: ast.stmt) -> bool:
    targets = [node for node in ast.walk(statement) if isinstance(node, ast.Attribute | ast.Subscript)]
    return any(not isinstance(target.ctx, ast.Load) for target in targets)


def _may_move(statement: ast.stmt, name: str, function: types.FunctionType) -> bool:
    """Return whether a statement, by itself, may run after the step as well.

    Args:
        statement: one of a function's own body.
        name: the variable with the loss.
        function: the user's loss, whose globals count.
    """
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False  # the docstring
    for node in ast.walk(statement):
        if isinstance(node, _REFUSED) or _writes_in_place(node, function):
            return False
        if isinstance(node, ast.Name) and not _is_movable(node.id, _value_of(node.id, function)):
            return False
        if isinstance(node, ast.Attribute | ast.Subscript):
            root, words = _root_of(node)
            value, is_read = _value_of(root, function), isinstance(node.ctx, ast.Load)
            is_of_torch = isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "torch"
            if (
                not _UNMOVABLE.isdisjoint(words)
                or (root == name and not _OF_LOSS.issuperset(words[:1]))
                or (is_of_torch and not _OF_TORCH.issuperset(words[:1]))
                or (isinstance(value, types.ModuleType) and not is_read)
                or ("environ" in words and words[words.index("environ") + 1 :] not in ([], ["get"]))
            ):
                return False
    return True


def _writes_in_place(node: ast.AST, function: types.FunctionType) -> bool:
    """Return whether a node may write into the memory of a tensor or an array, of which others may have views."""
    if isinstance(node, ast.Attribute) and _is_in_place(node.attr):
        return True
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id in function.__code__.co_varnames  # perhaps an array that is the loss's own memory
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return not isinstance(_value_of(_root_of(node)[0], function), list | dict | collections.deque)
    return False


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _root_of(node: ast.expr) -> tuple[str, list[str]]:
    """Return the name that a chain of attributes and items begins with, "" for none, and its attributes in order."""
    words = list[str]()
    while isinstance(node, ast.Attribute | ast.Subscript):
        words += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), words[::-1]


def _is_movable(name: str, value: Any) -> bool:
    """Return whether a log statement may mention a name: not what is None now, for nobody knows what it will be."""
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    is_of_clocks = isinstance(value, _FIXED) and str(home).partition(".")[0] in _UNMOVABLE
    return name not in _UNMOVABLE and value is not None and not is_of_clocks


def _value_of(name: str, function: types.FunctionType) -> Any:
    """Return what a name outside of a function stands for now."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:  # a variable of the outer function that has no value yet
            return MISSING
    return function.__globals__.get(name, MISSING)


# ---- what else reads -------------------------------------------------------------------------------------------------


def _meets(places: Sequence[PythonName], function: types.FunctionType, other_places: Sequence[PythonName]) -> bool:
    """Return whether log statements may write what something else in a step can reach."""
    values, read = [variable.get() for variable in places], [variable.get() for variable in other_places]
    codes = [function.__code__, *_codes_of(values)]
    names = {name for code in codes for name in names_in_code(code)}
    if not names.isdisjoint(_UNMOVABLE - {"time", "datetime"}) or any(map(_is_in_place, names)):
        return True
    of_others = {name for code in _codes_of(read) for name in names_in_code(code)}
    if not names.isdisjoint(_WRITES_FILES) and not of_others.isdisjoint(_READS_FILES):
        return True
    written = {name for code in codes for name in _written_names(code)}
    keys = {variable.key for variable in other_places}
    shared = [(variable, value) for variable, value in zip(places, values, strict=True) if variable.key in keys]
    if any(variable.name in written or _can_change(value) for variable, value in shared):
        return True
    reached, needed = _reach(values), _reach(read)
    if reached is None or needed is None:
        return True
    return any(isinstance(value, _TRAINED) for value in reached.values()) or not reached.keys().isdisjoint(needed)


def _codes_of(values: Sequence[Any]) -> Iterator[types.CodeType]:
    """Yield the code of functions inside of values, and of the methods of classes there, or of objects of them."""
    pending, visited = list(values), set[int]()
    while pending and len(visited) < MOST_VALUES:
        value = pending.pop()
        if type(value) in PLAIN or id(value) in visited or isinstance(value, types.ModuleType):
            continue
        visited.add(id(value))
        if isinstance(value, types.FunctionType):
            if is_project_file(value.__code__.co_filename):
                yield value.__code__
            pending += [vars(value)["__wrapped__"]] if "__wrapped__" in vars(value) else []
        else:
            kinds = (value if isinstance(value, type) else type(value)).__mro__
            methods = [member for kind in kinds if is_project_file(file_of(kind)) for member in vars(kind).values()]
            pending += [method for method in methods if isinstance(method, types.FunctionType)]
        pending += children_of(value)


def _written_names(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"):
            yield str(step.argval)


def _can_change(value: Any) -> bool:
    return type(value) not in PLAIN and not isinstance(value, (*_FIXED, tuple, frozenset))


def _reach(values: Sequence[Any]) -> dict[int, Any] | None:
    """Return all that can change inside of values, by id; None where that is too much to look at."""
    pending, mutable_values, visited = list(values), dict[int, Any](), set[int]()
    while pending:
        value = pending.pop()
        if type(value) in PLAIN or id(value) in visited:
            continue
        visited.add(id(value))
        if len(visited) > MOST_VALUES:
            return None
        if _can_change(value):
            mutable_values[id(value)] = value
        pending += children_of(value)
    return mutable_values
