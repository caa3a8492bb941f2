"""Python state: what the user's Python keeps outside of parameters and buffers; where it is, its digest, its return.

A capture runs the user's Python once and keeps what it computed, not how it counts. What it may have looked at or
changed is found by walking from what it can reach: attributes of modules, of their classes and of the loss; what
functions close over; their defaults and attributes; the globals that they name. Functions are walked in the user's own
files alone; what modules of libraries keep, they keep in attributes, or in caches that settle.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.source import is_users

# Attributes of a module that hold what torch itself looks after: they are restored elsewhere.
TORCHS = frozenset(("_parameters", "_buffers", "_modules", "training", "_call_impl"))
# Tables of hooks and the like, mostly empty: looked at where there is something in them.
_TORCHS_TABLES = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MISSING: Any = object()

_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OPAQUE = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "polylane", "builtins"}
_NODES = 20_000  # how much of one value is looked at
_LONG = 2_000  # elements of a sequence, of which the first and the last are looked at


@dataclass(frozen=True, eq=False)
class Place:
    """Something that the user's Python can read and write by a name.

    Attributes:
        owner: the module, class, function, object, dict of globals, or cell that has it.
        name: as the code says it.
        label: for the user.
        kind: "attribute", "global", "variable" (of a closure) or "default".
        path: of the module that has it, if one does.
    """

    owner: Any
    name: str
    label: str
    kind: str
    path: str | None = None

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def get(self) -> Any:
        """What is there now."""
        if isinstance(self.owner, types.CellType):
            try:
                return self.owner.cell_contents
            except ValueError:
                return MISSING
        if self.kind == "default":
            return _defaults(self.owner).get(self.name, MISSING)
        return _names(self.owner).get(self.name, MISSING)

    def put(self, value: Any) -> None:
        """Let it be that again."""
        if isinstance(self.owner, types.CellType):
            if value is not MISSING:
                self.owner.cell_contents = value
        elif self.kind == "default":
            return  # the object is the same; what is in it is put back by whoever remembered it
        elif isinstance(self.owner, type):
            if value is not MISSING:
                setattr(self.owner, self.name, value)
            elif self.name in vars(self.owner):
                delattr(self.owner, self.name)
        elif value is not MISSING:
            _names(self.owner)[self.name] = value
        else:
            _names(self.owner).pop(self.name, None)


def _names(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _defaults(function: Any) -> dict[str, Any]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount][code.co_argcount - len(values) :]
    return dict(zip(names, values, strict=False)) | (function.__kwdefaults__ or {})


def is_own(file: str) -> bool:
    """Whether a source file is part of what the user works on, rather than of an installed library."""
    return is_users(file) and not file.startswith(_LIBRARIES)


def _is_own_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None) or ""
    return kind.__module__ == "__main__" or is_own(file)


# ---- where it is -----------------------------------------------------------------------------------------------------


def places(
    modules: Iterable[tuple[str, nn.Module]],
    roots: Iterable[Any] = (),
    ran: Collection[types.CodeType] | None = None,
) -> list[Place]:
    """All places that modules, and whatever else is called, can reach.

    Args:
        modules: by path.
        roots: a loss, say: functions, bound methods, partials, objects that can be called.
        ran: the functions that are followed; default: all.
    """
    walk = _Places(ran)
    for path, module in modules:
        walk.module(path, module)
    for root in roots:
        walk.callable(root)
    return walk.found


_RUNS = (types.FunctionType, staticmethod, classmethod, property, functools.partial, functools.cached_property)


class _Places:
    def __init__(self, ran: Collection[types.CodeType] | None = None) -> None:
        self.found: list[Place] = []
        self._ran = ran
        self._seen: set[int] = set()
        self._keys: set[tuple[int, str]] = set()

    def _add(self, owner: Any, name: str, label: str, kind: str, path: str | None = None) -> None:
        place = Place(owner, name, label, kind, path)
        if place.key not in self._keys:
            self._keys.add(place.key)
            self.found.append(place)

    def _new(self, value: Any) -> bool:
        known = id(value) in self._seen
        self._seen.add(id(value))
        return not known

    def module(self, path: str, module: nn.Module) -> None:
        if not self._new(module):
            return
        for name, value in module.__dict__.items():
            if name not in TORCHS and (name not in _TORCHS_TABLES or value):
                self._add(module, name, f"{path}.{name}" if path else name, "attribute", path)
                if name.endswith("_hooks") and value:
                    for hook in list(value.values()):
                        self.callable(hook)
                elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    self.callable(value)
        self._class(type(module))

    def callable(self, value: Any) -> None:
        """A function, or what stands for one, and all that it can reach."""
        while isinstance(value, functools.partial):
            for part in (*value.args, *value.keywords.values()):
                self._value(part)
            value = value.func
        if isinstance(value, types.MethodType):
            self._object(value.__self__)
            value = value.__func__
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self.callable(part)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif value is not None:
            self._object(value)

    def _value(self, value: Any) -> None:
        """Something reached by name: what it runs, if it runs."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
            self.callable(value)
        elif has_own_class(value):
            self._class(type(value))

    def _object(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self.module(path, module)
        elif has_own_class(value) and self._new(value):
            for name, each in getattr(value, "__dict__", {}).items():
                self._add(value, name, f"{type(value).__name__}.{name}", "attribute")
                self._value(each)
            self._class(type(value))

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if not _is_own_class(each) or not self._new(each):
                continue
            for name, value in list(vars(each).items()):
                if name.startswith("__") and name.endswith("__") and not callable(value):
                    continue
                if isinstance(value, _RUNS):
                    self.callable(value)
                elif not isinstance(value, (type, types.GetSetDescriptorType, types.MemberDescriptorType)):
                    self._add(each, name, f"{each.__name__}.{name}", "attribute")

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if not is_own(code.co_filename) or not self._new(function):
            return
        if self._ran is not None and code not in self._ran:
            if "__wrapped__" in vars(function):
                self.callable(vars(function)["__wrapped__"])
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if not isinstance(value, (types.ModuleType, nn.Module)) and name != "__class__":
                self._add(cell, name, f"{name} of {function.__qualname__}", "variable")
            self._value(value)
        for name in _defaults(function):
            self._add(function, name, f"the default {name} of {function.__qualname__}", "default")
        for name, value in list(vars(function).items()):
            if name == "__wrapped__":
                self.callable(value)
            else:
                self._add(function, name, f"{function.__qualname__}.{name}", "attribute")
        named = names_in(code)
        for name in named & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                if is_own(getattr(value, "__file__", None) or ""):
                    self._globals(vars(value), named, f"{value.__name__}.")
            else:
                self._global(function.__globals__, name, "")

    def _globals(self, owner: dict[str, Any], named: Collection[str], prefix: str) -> None:
        for name in sorted(named & owner.keys()):
            if not isinstance(owner[name], types.ModuleType):
                self._global(owner, name, prefix)

    def _global(self, owner: dict[str, Any], name: str, prefix: str) -> None:
        value = owner[name]
        if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type, nn.Module)):
            self._add(owner, name, f"the global {prefix}{name}", "global")
        self._value(value)


def names_in(code: types.CodeType) -> set[str]:
    """Names that a function, and those written inside it, say."""
    found = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str):
            found.add(constant)  # getattr(self, "calls")
    return found


def has_own_class(value: Any) -> bool:
    """An object of a class that somebody wrote, rather than Python, torch or numpy."""
    kind = type(value)
    if kind in (types.SimpleNamespace,):
        return True
    root = kind.__module__.partition(".")[0]
    return root not in _OPAQUE and not isinstance(value, (type, types.ModuleType, nn.Module, Tensor))


# ---- what is there ---------------------------------------------------------------------------------------------------


class Digests:
    """Digests of values, all the way down, but for what belongs to torch: equal where nothing has changed.

    Args:
        known: ids of the model's own modules, parameters and buffers, which are not looked into.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> Any:
        """The digest of a value."""
        if type(value) in PLAIN:
            return type(value), repr(value)
        if id(value) not in self._digests:
            walk = _Digest(self._known)
            walk.take(value)
            self._digests[id(value)] = value, walk.hash.digest()
        return self._digests[id(value)][1]


class _Digest:
    def __init__(self, known: Collection[int]) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._known, self._seen, self._left = known, dict[int, int](), _NODES

    def _say(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def take(self, value: Any) -> None:
        self._left -= 1
        kind = type(value)
        if kind in PLAIN:
            self._say(kind.__name__, value)
        elif id(value) in self._known:
            self._say("own", id(value))
        elif id(value) in self._seen:
            self._say("again", self._seen[id(value)])
        elif self._left > 0:
            self._seen[id(value)] = len(self._seen)
            self._say(kind.__name__)
            self._inside(value)

    def _inside(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, dict):
            self._all(itertools.chain.from_iterable(_ends(list(value.items()))))
            self._say(len(value))
        elif isinstance(value, (list, tuple, deque)):
            self._say(len(value))
            self._all(_ends(list(value)))
        elif isinstance(value, (set, frozenset)):
            self._say(len(value), sorted(repr(each) for each in value if type(each) in PLAIN))
        elif (state := _generator_state(value)) is not None:
            self._say(str(state))
        elif isinstance(value, types.GeneratorType):
            self._say(value.gi_frame and value.gi_frame.f_lasti)
            self.take({} if value.gi_frame is None else dict(value.gi_frame.f_locals))
        elif isinstance(value, (itertools.count, bytearray)):
            self._say(repr(value))
        elif _is_array(value):
            self._say(value.shape, str(value.dtype))
            self.hash.update(value.tobytes() if value.dtype.hasobject is False else repr(value).encode())
        elif isinstance(value, types.MethodType):
            self.take(value.__self__)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            if is_own(value.__code__.co_filename):
                self._all(cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
                self._all((_defaults(value), vars(value)))
        elif isinstance(value, nn.Module):  # one that the model does not know of
            self._all(value.__dict__.items())
        elif has_own_class(value):
            self._all(_fields(value).items())

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.take(value)

    def _tensor(self, value: Tensor) -> None:
        self._say(tuple(value.shape), str(value.dtype), value.device.type)
        if value.is_meta or value.layout != torch.strided or not value.numel():
            return
        value = value.detach()
        if value.device.type == "cpu":
            plain = value.contiguous().resolve_conj().resolve_neg()
            self.hash.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        else:  # atomics reorder sums there: a value kept from the last pass is the same but for rounding
            size = value.to(torch.float64).abs().sum().item()
            self._say(f"{size:.3e}")


def _ends(values: Sequence[Any]) -> Iterable[Any]:
    return values if len(values) <= _LONG else (*values[: _LONG // 2], *values[-_LONG // 2 :])


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _generator_state(value: Any) -> Any:
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


def _fields(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots too."""
    slots = (name for each in type(value).__mro__ for name in _slots(each) if hasattr(value, name))
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


# ---- putting it back -------------------------------------------------------------------------------------------------


def remember(where: Iterable[Place], known: Collection[int]) -> Callable[[], None]:
    """Remember what is in places, contents and all; the result puts it back."""
    where, walk = list(where), _Remembered(known)
    owners = {id(place.owner): place.owner for place in where if _has_names_of_its_own(place.owner)}
    for owner in owners.values():
        if has_own_class(owner):
            walk.inside(owner)
    before = [(owner, frozenset(vars(owner))) for owner in owners.values()]
    values = [(place, walk.of(place.get())) for place in where]

    def restore() -> None:
        for owner, names in before:
            for name in vars(owner).keys() - names - TORCHS:
                delattr(owner, name)
        for place, value in values:
            place.put(value())
        for put_back in walk.contents:
            put_back()

    return restore


def _has_names_of_its_own(owner: Any) -> bool:
    """Whether whatever is new in it was put there by the user's Python; not so of the globals of a file."""
    return not isinstance(owner, (dict, types.CellType)) and hasattr(owner, "__dict__")


class _Remembered:
    """Collects how to put back what is inside of values; the objects themselves stay who they are."""

    def __init__(self, known: Collection[int]) -> None:
        self.contents: list[Callable[[], None]] = []
        self._known, self._seen = known, dict[int, Any]()

    def of(self, value: Any) -> Callable[[], Any]:
        """How to get a value again. An iterator only goes forward: it gives way to a copy."""
        if isinstance(value, (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))):
            kept = copy.copy(value)
            return lambda: copy.copy(kept)
        self.inside(value)
        return lambda: value

    def inside(self, value: Any) -> None:
        """Remember what is in a value."""
        if type(value) in PLAIN or id(value) in self._known or id(value) in self._seen or len(self._seen) > _NODES:
            return
        self._seen[id(value)] = value  # held, so that no other object gets its id
        for inner in self._children(value):
            self.inside(inner)

    def _children(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, dict):
            return self._contents(value, dict(value), list(value.values()))
        elif isinstance(value, (list, deque)):
            return self._contents(value, list(value), list(value))
        elif isinstance(value, set):
            self._contents(value, set(value), ())
        elif isinstance(value, bytearray):
            self._contents(value, bytes(value), ())
        elif isinstance(value, tuple):
            return value
        elif _generator_state(value) is not None:
            self._generator(value)
        elif _is_array(value):
            if value.flags.writeable:
                kept = value.copy()
                self.contents.append(lambda: value.__setitem__(Ellipsis, kept))
        elif isinstance(value, types.MethodType):
            return (value.__self__,)
        elif isinstance(value, functools.partial):
            return (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.FunctionType):
            if is_own(value.__code__.co_filename):
                return self._function(value)
        elif isinstance(value, nn.Module) or has_own_class(value):
            return self._object(value)
        return ()

    def _contents(self, value: Any, kept: Any, inner: Iterable[Any]) -> Iterable[Any]:
        def put_back() -> None:
            if isinstance(value, bytearray):
                value[:] = kept
            else:
                value.clear()
                getattr(value, "extend" if isinstance(value, (list, deque)) else "update")(kept)

        self.contents.append(put_back)
        return inner

    def _tensor(self, value: Tensor) -> None:
        if value.is_meta or not value.is_leaf:
            return
        kept, version = value.detach().clone(), value._version

        def put_back() -> None:
            if value.shape == kept.shape and not (value._version == version and torch.equal(value, kept)):
                with torch.no_grad():
                    value.data.copy_(kept)

        self.contents.append(put_back)

    def _generator(self, value: Any) -> None:
        state = copy.deepcopy(_generator_state(value))
        if isinstance(value, random.Random):
            self.contents.append(lambda: value.setstate(state))
        elif hasattr(value, "bit_generator"):
            self.contents.append(lambda: setattr(value.bit_generator, "state", state))
        else:
            self.contents.append(lambda: value.set_state(state))

    def _function(self, value: types.FunctionType) -> Iterator[Any]:
        for cell in value.__closure__ or ():
            if _filled(cell):
                kept = cell.cell_contents
                self.contents.append(functools.partial(setattr, cell, "cell_contents", kept))
                yield kept
        yield from _defaults(value).values()
        yield vars(value)

    def _object(self, value: Any) -> Iterable[Any]:
        if hasattr(value, "__dict__"):
            self._contents(value.__dict__, dict(value.__dict__), ())
        slots = [
            (name, getattr(value, name))
            for each in type(value).__mro__
            for name in _slots(each)
            if hasattr(value, name)
        ]
        for name, kept in slots:
            self.contents.append(functools.partial(object.__setattr__, value, name, kept))
        return _fields(value).values()
