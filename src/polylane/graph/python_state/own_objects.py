"""The user's own Python objects: which they are, and what is inside of them.

Files of torch and polylane are nobody's own; those of libraries are, where a caller asks for them too.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.python_state.user_lines import is_users

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = object()
MOST_VALUES = 20_000  # how many values inside of one are looked at

_INSTALLED = tuple({f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib")})
_LIBRARIES = (*_INSTALLED, *{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_NUMPY = tuple(f"{folder}numpy/" for folder in _INSTALLED)
_OPAQUE = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "polylane", "builtins"}


def is_project_file(file: str) -> bool:
    """Whether a source file is part of what the user works on, rather than of an installed library."""
    return is_users(file) and not file.startswith(_LIBRARIES)


def is_own_or_installed(file: str) -> bool:
    """Whether a source file is the user's, or of an installed library that is neither Python, torch nor numpy."""
    return is_project_file(file) or (is_users(file) and file.startswith(_INSTALLED) and not file.startswith(_NUMPY))


def file_of(kind: type) -> str:
    """The source file of a class's module; "" where there is none."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def names_in_code(code: types.CodeType) -> set[str]:
    """Names that a function, and those written inside it, say."""
    found = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in_code(constant)
        elif isinstance(constant, str):
            found.add(constant)  # getattr(self, "calls")
    return found


def is_of_project_class(value: Any) -> bool:
    """An object of a class that somebody wrote, rather than Python, torch or numpy."""
    kind = type(value)
    if kind in (types.SimpleNamespace,):
        return True
    root = kind.__module__.partition(".")[0]
    return root not in _OPAQUE and not isinstance(value, (type, types.ModuleType, nn.Module, Tensor))


def defaults_of(function: Any) -> dict[str, Any]:
    """The values that a function's parameters have by default, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


def is_filled(cell: types.CellType) -> bool:
    """Whether the variable of a closure has a value by now."""
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy's, which need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def generator_state(value: Any) -> Any:
    """The state of an object that random numbers are drawn from; None of anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def children_of(value: Any) -> list[Any]:
    """The values directly inside of another one, in a fixed order; none of what belongs to torch, numpy or Python."""
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(value.items()))
    if isinstance(value, (list, tuple, deque)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [*cells, defaults_of(value), vars(value)] if is_project_file(value.__code__.co_filename) else []
    if isinstance(value, nn.Module) or is_of_project_class(value):
        return list(itertools.chain.from_iterable(fields_of(value).items()))
    return []


def fields_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots too."""
    slots = (name for each in type(value).__mro__ for name in slots_of(each) if hasattr(value, name))
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def slots_of(kind: type) -> Iterable[str]:
    """Attributes that a class keeps in slots."""
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]
