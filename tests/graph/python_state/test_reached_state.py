"""State is found wherever the user's Python keeps it: whatever holds a function, or the value that a function reads."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import shutil
import threading
import types
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.python_state.captured_settings import CapturedSettings
from polylane.graph.python_state.side_effects import SideEffects
from polylane.graph.python_state.state import find_python_names

Read = Callable[[], Any]


def reader() -> tuple[Read, list[float]]:
    """A function, and what it alone refers to."""
    held = [1.0]

    def read() -> float:
        return held[0]

    return read, held


@dataclasses.dataclass
class Table:
    call: Read
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    call: Read


class Caller:
    def __init__(self, call: Read) -> None:
        self.kept = call

    def run(self) -> Any:
        return self.kept()

    def __call__(self) -> Any:
        return self.kept()


def cached(read: Read) -> Any:
    return functools.lru_cache(lambda: read())


def class_with(read: Read) -> Any:
    return type("Registry", (), {"__module__": __name__, "table": {"a": read}})


def local_with(read: Read) -> Any:
    local = threading.local()
    local.call = read
    return local


def variable_with(read: Read) -> Any:
    variable = contextvars.ContextVar[Any]("variable")
    variable.set(read)
    return variable


class Holding(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def forward(self) -> Any:
        return self.read()


HOLDERS: dict[str, Callable[[Read], Any]] = {
    "a dict": lambda read: {"x": read},
    "a list": lambda read: [None, read],
    "a tuple in a dict in a list": lambda read: [{"x": (1, read)}],
    "a deque": lambda read: deque([read]),
    "a read-only mapping": lambda read: types.MappingProxyType({"x": read}),
    "a dict of Python's own for users": lambda read: UserDict(x=read),
    "a namespace": lambda read: types.SimpleNamespace(x=[read]),
    "a dataclass": Table,
    "a dataclass in another one": lambda read: Table(print, Table(read)),
    "slots": Slotted,
    "a partial": lambda read: functools.partial(map, read),
    "a partial in a dict": lambda read: {"x": functools.partial(read)},
    "a bound method": lambda read: Caller(read).run,
    "an object that is called": lambda read: {"x": Caller(read)},
    "a cached function": cached,
    "an attribute of a class": class_with,
    "a class in a list": lambda read: [class_with(read)],
    "what belongs to a thread": local_with,
    "a context variable": variable_with,
    "a module that is no part of the model": Holding,
    "such a module in a list": lambda read: [nn.Sequential(Holding({"x": read}))],
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_function_is_followed_wherever_it_is_held(name: str) -> None:
    read, held = reader()
    holder = HOLDERS[name](read)

    def by_closure() -> Any:
        return holder

    def by_default(given: Any = holder) -> Any:
        return given

    def by_attribute() -> Any:
        return by_attribute.given  # type: ignore[attr-defined]

    by_attribute.given = holder  # type: ignore[attr-defined]
    for loss in (by_closure, by_default, by_attribute):
        assert any(place.get() is held for place in find_python_names([], [loss]))
    assert any(place.get() is held for place in find_python_names(Holding(holder).named_modules()))


@dataclasses.dataclass(slots=True)
class Options:
    scale: float = 1.0


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
OPTIONS, LOCAL, TEACHER = Options(), threading.local(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
TABLE = types.MappingProxyType(LISTED := {"scale": 1.0})
REFERENCE = weakref.ref(HELD := Caller(print))


def scaled() -> float:
    return 1.0


ACTIVE = scaled


def loss(model: nn.Module, x: Tensor) -> Tensor:
    scale = VARIABLE.get() * OPTIONS.scale * LOCAL.scale * TABLE["scale"] * ACTIVE() * REFERENCE().kept  # type: ignore
    return scale * TEACHER(model(x)).mean()


def replace_function() -> None:
    global ACTIVE
    ACTIVE = lambda: 2.0  # noqa: E731


def replace_data() -> None:
    TEACHER[0].weight.data = TEACHER[0].weight.data * 2


def replace_teacher() -> None:
    global TEACHER
    TEACHER = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))


CHANGES: dict[str, tuple[Callable[[], Any], str]] = {
    "a context variable": (lambda: VARIABLE.set(2.0), "VARIABLE"),
    "an object with slots": (lambda: setattr(OPTIONS, "scale", 2.0), "OPTIONS"),
    "what belongs to a thread": (lambda: setattr(LOCAL, "scale", 2.0), "LOCAL.scale"),
    "what a read-only mapping shows": (lambda: LISTED.__setitem__("scale", 2.0), "TABLE"),
    "what a weak reference refers to": (lambda: setattr(HELD, "kept", 2.0), "kept"),
    "a global that is a function": (replace_function, "ACTIVE"),
    "the mode of a module that is no part of the model": (lambda: TEACHER[1].eval(), "training"),
    "the memory of such a module's weight": (replace_data, "weight"),
    "such a module itself": (replace_teacher, "TEACHER"),
}


def test_a_change_between_steps_is_seen_wherever_the_value_is_held() -> None:
    LOCAL.scale = 1.0
    model = nn.Linear(2, 2)
    ran = frozenset((loss.__code__, nn.Dropout.forward.__code__, nn.Linear.forward.__code__))
    for name, (change, label) in CHANGES.items():
        settings = CapturedSettings(model, [loss], SideEffects(functions_run=ran), (), True)
        assert settings.find_change() is None, name
        change()
        found = settings.find_change()
        assert found is not None and label in found, (name, found)


def test_what_is_put_into_a_folder_that_was_looked_for_is_no_change(tmp_path: Path) -> None:
    """A checkpoint, for example; to make or to remove a folder or a file is one, and to write a file."""
    folder, file, missing = tmp_path / "run", tmp_path / "scale", tmp_path / "stop"
    folder.mkdir()
    file.write_text("1.0")
    effects = SideEffects(files=tuple(map(str, (folder, file, missing))))

    def changed(change: Callable[[], object]) -> str | None:
        settings = CapturedSettings(nn.Linear(2, 2), [loss], effects, (), True)
        change()
        return settings.find_changed_file()

    assert changed((folder / "checkpoint").mkdir) is None
    assert changed(lambda: file.write_text("0.25")) == f"the file {file}"
    assert changed(missing.touch) == f"the file {missing}"
    assert changed(missing.unlink) == f"the file {missing}"
    assert changed(lambda: shutil.rmtree(folder)) == f"the file {folder}"


def test_weights_that_a_script_averages_into_another_module_are_no_setting() -> None:
    """The graph reads them where they are: nothing is captured again when a teacher follows its student."""
    ran = frozenset((loss.__code__, nn.Dropout.forward.__code__, nn.Linear.forward.__code__))
    LOCAL.scale = 1.0
    settings = CapturedSettings(nn.Linear(2, 2), [loss], SideEffects(functions_run=ran), (), True)
    with torch.no_grad():
        TEACHER[0].weight.mul_(0.5)
    assert settings.find_change() is None
