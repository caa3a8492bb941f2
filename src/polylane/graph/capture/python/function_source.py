"""Source of the user's functions: their definitions, and functions like them that run a part of their lines."""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import textwrap
import types
from collections.abc import Sequence
from typing import Any

_INNER = "__of_the_users"
_OPERATORS = ("BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "UNARY_NOT", "UNARY_NEGATIVE", "UNARY_INVERT")


def read_definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """Return the definition of a function, its lines numbered as in its file; None if its source is not what runs."""
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    # A function of a notebook or of exec has no file, a lambda in the midst of a line no source that parses.
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    ast.increment_lineno(tree, first_line - 1)
    copy = build_function(function, definition, definition.body)
    # The file may have been edited since, or the function been rewritten by a tool.
    return definition if _same_code(copy.__code__, function.__code__) else None


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Return whether two functions are compiled of the same lines; imports around them make instructions differ."""
    if _summarize(a) != _summarize(b):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(_same_code(x, y) if _is_code(x) and _is_code(y) else repr(x) == repr(y) for x, y in pairs)


def _summarize(code: types.CodeType) -> tuple[Any, ...]:
    operators = [(step.opname, step.argrepr) for step in dis.get_instructions(code) if step.opname in _OPERATORS]
    lines = [line for line, _ in itertools.groupby(line for _, _, line in code.co_lines())]
    return code.co_names, code.co_varnames, code.co_freevars, len(code.co_consts), lines, operators


def build_function(
    like: types.FunctionType, definition: ast.FunctionDef, body: Sequence[ast.stmt], argument: str = ""
) -> types.FunctionType:
    """Return a function with another body, and the globals, variables, defaults and lines of the user's.

    Args:
        like: the user's function, of which it has all else.
        definition: how the user's function is defined.
        body: the statements that the other function has.
        argument: name of the only argument; "": the arguments of the user's function.
    """
    only = ast.arguments([], [ast.arg(argument)], None, [], [], None, [])
    # A name of its own: the function may mention its own name, which is a global's then.
    inner = ast.FunctionDef(_INNER, only if argument else definition.args, list(body), [], None, None)
    free_variables = [ast.arg(name) for name in like.__code__.co_freevars]
    outer = ast.FunctionDef("outer", ast.arguments([], free_variables, None, [], [], None, []), [inner], [], None, None)
    tree = ast.fix_missing_locations(
        ast.copy_location(ast.Module([ast.copy_location(outer, definition)], []), definition)
    )
    # Defaults and annotations are evaluated by nobody: code objects alone are taken.
    code: Any = next(item for item in compile(tree, like.__code__.co_filename, "exec").co_consts if _is_code(item))
    code = next(item for item in code.co_consts if _is_code(item) and item.co_name == _INNER)
    code = code.replace(co_name=like.__code__.co_name, co_qualname=like.__code__.co_qualname)
    cells = dict(zip(like.__code__.co_freevars, like.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    built = types.FunctionType(code, like.__globals__, like.__name__, None, closure)
    if not argument:
        built.__defaults__, built.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
        built.__qualname__, built.__module__ = like.__qualname__, like.__module__
        vars(built).update(vars(like))
    return built


def _is_code(value: Any) -> bool:
    return isinstance(value, types.CodeType)
