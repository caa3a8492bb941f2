"""Watched run: clocks and environment that the user's code reads, hooks on gradients, backward passes of its own."""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from polylane.graph.python_state.own_objects import is_project_file, is_users

_CLOCKS = {
    getattr(time, name): f"time.{name}"
    for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
}
_CLOCK_METHODS = ("datetime.now", "datetime.utcnow", "date.today", "datetime.today")
_ENVIRONMENT = type(os.environ).__getitem__.__code__
# Python's functions that look for a file, with the name of the argument that says which.
_LOOKED_FOR = {
    os.path.exists.__code__: "path",
    os.path.isfile.__code__: "path",
    os.path.getmtime.__code__: "filename",
    os.path.getsize.__code__: "filename",
    Path.stat.__code__: "self",
}
# Functions that register a hook on a value's gradient: of tensors in Python, of nodes of autograd's graph in C.
_TENSOR_HOOKS = (Tensor.register_hook.__code__, Tensor.register_post_accumulate_grad_hook.__code__)
_NODE_HOOKS = ("register_hook", "register_prehook")


@dataclass(frozen=True)
class SideEffect:
    """Something that a module, or the loss, does besides computing.

    Attributes:
        path: path of the module that has to be a leaf; "": model and loss together.
        what: description for the user, such as "writes self.calls".
        line: "file:line" of the user's code, or "".
        kind: one of "state", "random", "clock" and "hook" (called in backward passes, which a graph would leave out).
        function: the function that draws, of those that a namespace has by their name; None where there is none.
    """

    path: str
    what: str
    line: str
    kind: str
    function: types.FunctionType | None = None

    @property
    def describe(self) -> str:
        """The effect and its line, for messages to the user."""
        return f"{self.what} ({self.line})" if self.line else self.what


class RunWatch:
    """Profiler that records clocks, environment keys and files read by the user's lines or the model's own files.

    Clocks read by anything else (another profiler, a hook of the garbage collector) do not belong to the forward. Hooks
    on gradients that are registered by whatever runs are recorded with the clocks.
    """

    def __init__(self, paths: Mapping[int, str], model: nn.Module) -> None:
        self._paths = paths
        self._files = {type(module).forward.__code__.co_filename for module in model.modules() if _is_written(module)}
        self.found: list[SideEffect] = []
        self.environment: list[str] = []
        self.files: list[str] = []
        self.ran: set[types.CodeType] = set()

    @contextmanager
    def profiling(self) -> Iterator[None]:
        profiler, opens = sys.getprofile(), io.open

        @functools.wraps(opens)
        def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "r" in mode:
                self._note_file(sys._getframe(1), file)
            return opens(file, mode, *args, **kwargs)

        sys.setprofile(self._on_event)
        try:
            with patch.object(io, "open", watched_open), patch.object(builtins, "open", watched_open):
                yield
        finally:
            if profiler is None or callable(profiler):
                sys.setprofile(profiler)
            else:  # cProfile: getprofile returns an object that can only enable itself
                sys.setprofile(None)
                profiler.enable()

    def _on_event(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call":  # clocks are C functions
            clock = _clock_name(function)
            if clock and self._is_watched(frame):
                path, text = innermost_module(frame, self._paths), f"reads the clock, {clock}"
                self.found.append(SideEffect(path, text, line_of_frame(frame), "clock"))
            if getattr(function, "__name__", "") in _NODE_HOOKS:
                self._note_hook(frame)
        elif event == "call":
            self.ran.add(frame.f_code)
            if frame.f_code in _TENSOR_HOOKS and frame.f_back is not None:
                self._note_hook(frame.f_back)
            elif frame.f_code is _ENVIRONMENT:
                key = frame.f_locals.get("key")
                if isinstance(key, str) and self._is_watched(_caller(frame)):
                    self.environment.append(key)
            elif frame.f_code in _LOOKED_FOR:
                self._note_file(frame, frame.f_locals.get(_LOOKED_FOR[frame.f_code]))

    def _note_file(self, frame: types.FrameType, file: Any) -> None:
        """Record a file that is read or looked for by its name."""
        if isinstance(file, (str, os.PathLike)) and self._is_watched(_caller(frame)):
            self.files.append(os.path.abspath(os.fspath(file)))

    def _note_hook(self, frame: types.FrameType) -> None:
        """Record the module that registers a hook in its forward, or has one of ``register_full_backward_hook``."""
        path, in_forward = innermost_module(frame, self._paths), not _is_torchs(frame)
        text = "registers a hook on a gradient in its forward" if in_forward else "has a hook on its backward pass"
        line = line_of_frame(frame) if in_forward else _line_of_hooks(frame)
        if not any(effect.kind == "hook" and effect.path == path for effect in self.found):
            self.found.append(SideEffect(path, text, line, "hook"))

    def _is_watched(self, frame: types.FrameType) -> bool:
        file = frame.f_code.co_filename
        return file in self._files or (is_project_file(file) and not is_stdlib(frame))


def _is_written(module: nn.Module) -> bool:
    """Return whether a module's forward is Python outside of torch."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and is_users(code.co_filename)


def _clock_name(function: Any) -> str:
    try:
        name = _CLOCKS.get(function, "")
    except TypeError:  # unhashable callables
        return ""
    method = getattr(function, "__qualname__", "")
    return name or (method if method in _CLOCK_METHODS else "")


_PYTHONS = (sys.stdlib_module_names | {"numpy"}) - {"__main__"}


def is_stdlib(frame: types.FrameType) -> bool:
    """Return whether a frame belongs to Python's own library or numpy: then its caller is responsible."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PYTHONS


def _line_of_hooks(frame: types.FrameType | None) -> str:
    """Return where the first backward hook of the module whose call a frame belongs to is defined."""
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    module = None if frame is None else frame.f_locals.get("self")
    hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()] if module is not None else []
    code = next((hook.__code__ for hook in hooks if hasattr(hook, "__code__")), None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _is_torchs(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _caller(frame: types.FrameType) -> types.FrameType:
    """Return the nearest caller outside of Python's own library."""
    while frame.f_back is not None and is_stdlib(frame):
        frame = frame.f_back
    return frame


def line_of_frame(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def innermost_function(frame: types.FrameType | None) -> types.FunctionType | None:
    """Return the innermost function of a namespace that a frame belongs to, within the call of a module."""
    while frame is not None and frame.f_code is not CALL:
        function = frame.f_globals.get(frame.f_code.co_name)
        if isinstance(function, types.FunctionType) and function.__code__ is frame.f_code:
            return function
        frame = frame.f_back
    return None


def innermost_module(frame: types.FrameType | None, paths: Mapping[int, str]) -> str:
    """Return the path of the innermost module of a model whose call a frame belongs to."""
    while frame is not None:
        if frame.f_code is CALL and (path := paths.get(id(frame.f_locals.get("self")))) is not None:
            return path
        frame = frame.f_back
    return ""


CALL = nn.Module._call_impl.__code__


@contextmanager
def watch_backward() -> Iterator[list[bool]]:
    """Context manager: the yielded list gets an entry when autograd runs inside: whether into ``.grad``."""
    autograd: Any = torch.autograd
    backwards, noted = autograd._engine_run_backward, list[bool]()

    def run(*args: Any, **kwargs: Any) -> Any:
        noted.append(bool(kwargs.get("accumulate_grad")))
        return backwards(*args, **kwargs)

    with patch.object(autograd, "_engine_run_backward", run):
        yield noted
