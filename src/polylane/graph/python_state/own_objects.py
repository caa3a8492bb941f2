"""The user's own Python objects: which objects these are, and which values they contain.

Files of torch and polylane are never the user's; those of installed libraries only where a caller asks for them too.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import itertools
import mmap
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = object()
MOST_VALUES = 20_000  # limit on the number of nested values that are visited

# Whole folders, with a trailing slash: a user's own checkout may well be called polylane or torch.
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", "<")
# A virtual environment may be set up over another one, or over the system's: each has a folder of its own on the path.
_PACKAGES = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
_INSTALLED = tuple({f"{folder}/" for folder in [*map(sysconfig.get_path, ("purelib", "platlib")), *_PACKAGES]})
_LIBRARIES = (*_INSTALLED, *{f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_NUMPY = tuple(f"{folder}numpy/" for folder in _INSTALLED)
_OPAQUE = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "polylane", "builtins"}
# Python's own classes whose objects only hold what the user puts there, as attributes.
_HOLDERS = (types.SimpleNamespace, threading.local, UserDict, UserList, ChainMap)
_C_OBJECTS = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_CACHED = type(functools.lru_cache(lambda: None))
# What holds another value without being a container, and how that is read.
_REFERENCES: tuple[tuple[Any, Any], ...] = (
    (weakref.ReferenceType, lambda reference: reference()),
    (contextvars.ContextVar, lambda variable: variable.get(None)),
    (_CACHED, lambda cached: cached.__wrapped__),
    (functools.partialmethod, lambda partial: (partial.func, partial.args, partial.keywords)),
)


def is_users(file: str) -> bool:
    """Return whether a source file is the user's own (or of a library they use), not torch's or polylane's."""
    return bool(file) and not file.startswith(_NOT_THE_USERS)


def is_project_file(file: str) -> bool:
    """Return whether a source file is the user's project, not an installed library."""
    return is_users(file) and not file.startswith(_LIBRARIES)


def innermost_line(frames: Iterable[tuple[str, Any]]) -> str:
    """Return the innermost of the user's lines, "file:line"; of one in a library, also the line that led there.

    Args:
        frames: file and line of each frame, outermost first.
    """
    users = [(file, line) for file, line in frames if is_users(file)]
    if not users:
        return ""
    (file, line), lines = users[-1], [f"{file}:{line}" for file, line in users if is_project_file(file)]
    return f"{file}:{line}, called from {lines[-1]}" if lines and not is_project_file(file) else f"{file}:{line}"


def is_own_or_installed(file: str) -> bool:
    """Return whether a source file is the user's, or of an installed library other than Python, torch and numpy."""
    return is_project_file(file) or (is_users(file) and file.startswith(_INSTALLED) and not file.startswith(_NUMPY))


def file_of(kind: type) -> str:
    """Return the source file of a class's module, or of its methods where nobody has imported that; "" for none."""
    if kind.__module__ in sys.modules:
        return getattr(sys.modules[kind.__module__], "__file__", None) or ""
    return next((v.__code__.co_filename for v in vars(kind).values() if isinstance(v, types.FunctionType)), "")


def names_in_code(code: types.CodeType) -> set[str]:
    """Return the names that occur in a function, and in functions defined inside it."""
    names = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in_code(constant)
        elif isinstance(constant, str):
            names.add(constant)  # a name in a string: getattr(self, "calls")
    return names


def is_of_project_class(value: Any) -> bool:
    """Return whether a value is an object of a class outside of Python, torch and numpy."""
    kind = type(value)
    if kind in _HOLDERS:
        return True
    root = kind.__module__.partition(".")[0]
    return root not in _OPAQUE and not isinstance(value, (type, types.ModuleType, nn.Module, Tensor))


def defaults_of(function: Any) -> dict[str, Any]:
    """Return the default values of a function's parameters, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    # Positional defaults belong to the last positional parameters.
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


def is_filled(cell: types.CellType) -> bool:
    """Return whether a closure's variable has a value yet."""
    try:
        return cell.cell_contents is not MISSING
    except ValueError:  # the outer function has not reached the line that assigns it
        return False


def is_array(value: Any) -> bool:
    """Return whether a value is a numpy array; numpy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def read_memory(value: Any) -> bytes | None:
    """Return the bytes of an object that Python code writes into like a C array; None for anything else.

    Of an ``array.array``, of ctypes and ``multiprocessing.Value``, of an ``mmap``; numpy's arrays are no such.
    """
    if isinstance(value, array.array | bytearray):
        return bytes(memoryview(value).cast("B"))
    return None if (buffer := _buffer_of(value)) is None else bytes(buffer)


def write_memory(value: Any, content: bytes) -> None:
    """Write what :func:`read_memory` has returned back into the object."""
    if isinstance(value, array.array):  # which may have another length now
        del value[:]
        value.frombytes(content)
    elif isinstance(value, bytearray):
        value[:] = content
    elif (buffer := _buffer_of(value)) is not None:
        buffer[:] = content


def is_shared_memory(value: Any) -> bool:
    """Return whether processes that are forked write into the same object."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    # A RawValue is an object of ctypes that refers to its block of shared memory by this name.
    is_raw = isinstance(value, _C_OBJECTS) and hasattr(value, "_wrapper")
    return is_raw or isinstance(value, mmap.mmap) or (shared is not None and isinstance(value, shared.SynchronizedBase))


def _buffer_of(value: Any) -> Any:
    """Return the bytes of a ctypes object or a memory map, to be written into; None for anything else."""
    if is_shared_memory(value) and not isinstance(value, (mmap.mmap, *_C_OBJECTS)):
        value = value.get_obj()
    if not isinstance(value, (mmap.mmap, *_C_OBJECTS)):
        return None
    try:
        return (ctypes.c_ubyte * memoryview(value).nbytes).from_buffer(value)
    except (TypeError, ValueError):  # a map that may only be read, or that is closed
        return None


def generator_state(value: Any) -> Any:
    """Return the state of a random generator object; None for anything else."""
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
    """Return the values directly inside of another one, in a fixed order; none of torch's, numpy's or Python's own."""
    # By the methods of Python's own classes: those of the user's may raise, or run code of theirs.
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(dict.items(value)))
    kinds: tuple[Any, ...] = (list, tuple, deque)
    for kind in kinds:
        if isinstance(value, kind):
            return list(kind.__iter__(value))
    if isinstance(value, types.MappingProxyType):
        return list(itertools.chain.from_iterable(value.items()))
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.BuiltinMethodType):  # history.append; of a function of a module it is the module
        return [] if isinstance(value.__self__, types.ModuleType | type(None)) else [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [*cells, defaults_of(value), vars(value)] if is_project_file(value.__code__.co_filename) else []
    if isinstance(value, nn.Module) or is_of_project_class(value):
        return list(itertools.chain.from_iterable(fields_of(value).items()))
    return [read(value) for kind, read in _REFERENCES if isinstance(value, kind)]


def fields_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in slots."""
    return {**slots_of(value), **getattr(value, "__dict__", {})}


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object keeps in slots."""
    tables = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in tables for name in ((slots,) if isinstance(slots, str) else slots)]
    attributes = [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
    return {name: getattr(value, name) for name in attributes}
