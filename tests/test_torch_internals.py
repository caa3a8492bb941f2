"""docs/development/torch_internals.md has a row for all that the next torch or Python may break, and no row too many.

Found in the source's syntax: names with a leading underscore that are torch's or Python's, what is put in the places of
their functions, and hooks of the whole process. Syntax does not say what a value is: an attribute ``._x`` is taken for
torch's where no class of the package has one of that name.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.test_house import SOURCE, Module, read_library

PAGE = SOURCE.parents[1] / "docs" / "development" / "torch_internals.md"

# Python documents these as public, whatever their names begin with.
DOCUMENTED = frozenset(("os._exit", "._fields", "._make", "._replace", "._asdict", "ctypes._SimpleCData"))
# Functions that change the whole process, and modules whose answers depend on the interpreter.
HOOKS = frozenset(
    [
        "ctypes",
        "dis",
        "faulthandler.register",
        "gc.disable",
        "gc.enable",
        "gc.freeze",
        "opcode",
        "os.register_at_fork",
        "signal.set_wakeup_fd",
        "signal.signal",
        "sys.addaudithook",
        "sys.setprofile",
        "sys.settrace",
        "threading.setprofile",
        "threading.settrace",
    ]
)
# Attributes that torch's objects have, also where a class of the package has one of the same name.
TORCHS_ATTRIBUTES = frozenset(dir(torch.nn.Module())) | {"_base", "_is_view", "_version"}
_PRIVATE = re.compile(r"_(?!polylane)[a-zA-Z]\w*")


class UseFinder:
    """Finds in one file what is torch's or Python's own, each by the name that the page gives it.

    Args:
        module: the file's syntax.
        defined: private names that the package itself defines.
    """

    def __init__(self, module: Module, defined: Set[str]) -> None:
        self._nodes, self._defined = _sort_by_type(module.nodes), defined
        self._full_names: dict[str, str] = {}
        for imported in self._nodes[ast.Import]:
            for alias in imported.names:
                top = alias.name.partition(".")[0]
                self._full_names |= {alias.asname: alias.name} if alias.asname else {top: top}
        for imported in self._nodes[ast.ImportFrom]:
            self._full_names |= {a.asname or a.name: f"{imported.module}.{a.name}" for a in imported.names}
        for node in self._nodes[ast.Assign] + self._nodes[ast.AnnAssign]:  # another name: proxies = torch.fx.proxy
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (full := self._resolve(node.value)) is not None:
                self._full_names.setdefault(target.id, full)

    def find(self) -> Iterator[str]:
        """Yield the names: ``torch._C.x``, ``._x`` of any object, ``torch.ops.aten._x`` of an operator."""
        for imported in self._nodes[ast.Import] + self._nodes[ast.ImportFrom]:
            module = f"{imported.module}." if isinstance(imported, ast.ImportFrom) else ""
            for alias in imported.names:
                yield from _cut_to_private(module + alias.name)
        inner = {id(node.value) for node in self._nodes[ast.Attribute]}
        for node in self._nodes[ast.Attribute]:
            yield from self._find_attribute(node, is_whole=id(node) not in inner)
        endings = set[int]()
        for node in self._nodes[ast.Call]:
            yield from self._find_patch(node)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "endswith":
                endings |= set(map(id, node.args))
        for node in self._nodes[ast.Constant]:
            if isinstance(node.value, str) and _PRIVATE.fullmatch(node.value) and id(node) not in endings:
                yield from self._find_text(node.value)
        for node in self._nodes[ast.Subscript]:
            if not isinstance(node.ctx, ast.Load) and self._resolve(node.value) == "sys.modules":
                yield "sys.modules"

    def _find_attribute(self, node: ast.Attribute, *, is_whole: bool) -> Iterator[str]:
        full = self._resolve(node)
        if node.attr in ("__code__", "__class__") and not isinstance(node.ctx, ast.Load):
            yield f".{node.attr}"  # of a function or an object that is there already
        elif full is None:
            is_torchs = node.attr in TORCHS_ATTRIBUTES and ast.unparse(node.value) != "self"
            if _PRIVATE.fullmatch(node.attr) and (is_torchs or node.attr not in self._defined):
                yield f".{node.attr}"
        elif not isinstance(node.ctx, ast.Load) and not full.startswith("polylane"):
            yield full
        elif is_whole:
            yield from _cut_to_private(full)

    def _find_text(self, text: str) -> Iterator[str]:
        if text in TORCHS_ATTRIBUTES:
            yield f".{text}"
        elif text not in self._defined:
            yield f"torch.ops.aten.{text}" if hasattr(torch.ops.aten, text) else f".{text}"

    def _find_patch(self, node: ast.Call) -> Iterator[str]:
        full = self._resolve(node.func)
        if full == "unittest.mock.patch.object":
            yield f"{self._resolve(node.args[0]) or ''}.{ast.literal_eval(node.args[1])}"
        elif full == "unittest.mock.patch.dict":
            yield self._resolve(node.args[0]) or ast.unparse(node.args[0])

    def _resolve(self, node: ast.expr) -> str | None:
        """Return the full name of a chain of attributes that begins with an import; None for another value."""
        if isinstance(node, ast.Name):
            return self._full_names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._resolve(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None


def _sort_by_type(nodes: Iterable[ast.AST]) -> defaultdict[type, list[Any]]:
    by_type = defaultdict[type, list[Any]](list)
    for node in nodes:
        by_type[type(node)].append(node)
    return by_type


def _cut_to_private(full: str) -> Iterator[str]:
    """Yield a dotted name up to one part after its last private one, and a hook whole; nothing for any other name."""
    parts = full.split(".")
    private = [i for i, part in enumerate(parts) if _PRIVATE.fullmatch(part)]
    if private and parts[0] != "polylane":
        yield ".".join(parts[: private[-1] + 2])
    elif full in HOOKS:
        yield full


def _find_defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, variables, attributes of ``self``."""
    by_type = _sort_by_type(nodes)
    yield from (node.name for kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef) for node in by_type[kind])
    yield from (node.id for node in by_type[ast.Name] if isinstance(node.ctx, ast.Store))
    for node in by_type[ast.Attribute]:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def find_uses(modules: Mapping[str, Module]) -> set[tuple[str, str]]:
    """Return all uses of what is torch's or Python's own: its name, and the file's path inside the package."""
    defined = {name for module in modules.values() for name in _find_defined(module.nodes)}
    uses = ((name, str(module.path)) for module in modules.values() for name in UseFinder(module, defined).find())
    return {(name, file) for name, file in uses if name not in DOCUMENTED}


def read_rows() -> list[tuple[list[str], list[str]]]:
    """Return the rows of the page's tables: names, and the files or folders in which they are used."""
    cells = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", row[0]), re.findall(r"`([^`]+)`", row[1])) for row in cells]


def test_every_use_of_an_internal_has_a_row_and_every_row_a_use() -> None:
    uses, rows = find_uses(read_library().modules), read_rows()
    rowed = {(name, place) for names, places in rows for name in names for place in places}

    def is_in(use: tuple[str, str], row: tuple[str, str]) -> bool:
        """A row speaks for what is below its names and folders too."""
        (name, file), (row_name, place) = use, row
        return f"{name}.".startswith(f"{row_name}.") and (file == place or file.startswith(f"{place.rstrip('/')}/"))

    missing = [f"{use[0]} in {use[1]}" for use in sorted(uses) if not any(is_in(use, row) for row in rowed)]
    assert not missing, (
        "take a public name of torch instead, or add to docs/development/torch_internals.md a row (name, files, why no "
        f"public name does it, the test that fails without it) or the file to its row: {'; '.join(missing)}"
    )
    stale = [
        f"{names} in {places}"
        for names, places in rows
        if any(not any(is_in(use, (name, place)) for use in uses for place in places) for name in names)
        or any(not any(is_in(use, (name, place)) for use in uses for name in names) for place in places)
    ]
    assert not stale, f"take out of {PAGE.name} what the source does not use: {'; '.join(stale)}"


def test_all_kinds_of_uses_are_found() -> None:
    text = """
import signal as s, torch, sys
from torch._ops import OpOverload
from unittest.mock import patch
_rnn = torch.nn.modules.rnn
class Own(torch.nn.Module):
    def f(self, x):
        self._mine = x._version
        return self._mine, '_mine', x.endswith('_as')
def g(module, value):
    value._mine, value._schema, module._parameters = 1, 2, 3
    torch.nn.Module.forward = sys.stdout = None
    sys.modules['x'] = torch._C._autograd.y.z
    s.signal(1, 2)
    with patch.object(_rnn, 'int', 3):
        value.f.__code__ = getattr(value, '_buffers', '_softmax')
"""
    assert {name for name, _ in find_uses({"a": Module(Path("a.py"), 1, ast.parse(text))})} == {
        ".__code__", "._buffers", "._parameters", "._schema", "._version", "signal.signal", "sys.modules", "sys.stdout",
        "torch._C._autograd.y", "torch._ops.OpOverload", "torch.nn.Module.forward", "torch.nn.modules.rnn.int",
        "torch.ops.aten._softmax",
    }  # fmt: skip


def test_make_fx_writes_the_gradient_mode_as_the_function_that_traces_leave_out() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    traced = make_fx(compute, pre_dispatch=True)(torch.ones(2))
    assert [node.target for node in traced.graph.nodes].count(torch._C._set_grad_enabled) == 2
