"""Side effects of a forward or loss besides computing: Python state, random numbers, clocks, the environment.

``torch.export`` runs the user's Python once and freezes all of these. They are found by running the user's code as it
is. State counts as kept if it still changes from the second run to the third on the same batch, from the same weights
and random numbers, or if another batch changes it again (the last loss): caches that are built once, and flags that are
set once, have settled by then. (Whether results
depend on such a flag is found by the self-check, which makes two steps.) Clocks are seen by a profiler when they are
called; the environment is treated as a setting (see :mod:`polylane.graph.python_state.captured_settings`).

Effects are then located, line by line: the module whose call contains the line, or the innermost one that contains all
readers and writers of the same state, has to run as a leaf.
"""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.python_state.iterators import find_forward_only
from polylane.graph.python_state.own_objects import MISSING, is_users, names_in_code
from polylane.graph.python_state.random_generators import generator_states, generators_drawn_from, restore_generators
from polylane.graph.python_state.run_watch import (
    CALL,
    RunWatch,
    SideEffect,
    innermost_function,
    innermost_module,
    is_stdlib,
    line_of_frame,
)
from polylane.graph.python_state.state import PythonName, find_python_names
from polylane.graph.python_state.state_snapshots import StateDigests


@dataclass(frozen=True)
class SideEffects:
    """What running a loss was seen to do and to read, besides computing.

    Attributes:
        found: effects that make modules leaves.
        written_names: Python names that were written at least once.
        environment_keys: keys of the environment that were read.
        files: absolute paths of the files that were read, or looked for.
        functions_run: code objects of the functions that ran.
        written_parameters: names of the parameters that were written, by an operator or through ``.data``.
        moved_parameters: names of those that were given other memory (``parameter.data = new``).
    """

    found: tuple[SideEffect, ...] = ()
    written_names: tuple[PythonName, ...] = ()
    environment_keys: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    functions_run: frozenset[types.CodeType] = frozenset()
    written_parameters: frozenset[str] = frozenset()
    moved_parameters: frozenset[str] = frozenset()

    def merged_with(self, other: SideEffects) -> SideEffects:
        """Return these effects with the state that another run of the same model kept."""
        state_effects = [effect for effect in other.found if effect.kind == "state"]
        effects, touched = (
            dict.fromkeys((*self.found, *state_effects)),
            dict.fromkeys((*self.written_names, *other.written_names)),
        )
        return replace(self, found=tuple(effects), written_names=tuple(touched))


@dataclass
class _WatchedRun:
    """The run that is watched, and what it may reach.

    Attributes:
        model: the user's model, which the loss calls.
        losses: the user's loss, a function or a module; and further functions that a run calls.
        paths: path of every module of the model, by the module's id.
        torch_ids: ids of modules, parameters and buffers.
    """

    model: nn.Module
    losses: Sequence[Any]
    paths: dict[int, str] = field(init=False)
    torch_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = {id(module): path for path, module in self.model.named_modules()}
        self.torch_ids = torch_object_ids(self.model, *self.losses)

    def digests(self) -> dict[tuple[int, str], tuple[PythonName, Any]]:
        digests = StateDigests(self.torch_ids)
        return {name.key: (name, digests.of(name.get())) for name in python_names_of(self.model, *self.losses)}


def python_names_of(model: nn.Module, *losses: Any) -> list[PythonName]:
    """Return the names under which a model and losses may keep something in Python."""
    modules = [*model.named_modules(), *modules_of_losses(losses)]
    return find_python_names(modules, [loss for loss in losses if not isinstance(loss, nn.Module)])


def modules_of_losses(losses: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    """Return the modules of losses that are modules themselves, with paths that begin with "loss"."""
    modules = [pair for loss in losses if isinstance(loss, nn.Module) for pair in loss.named_modules()]
    return [(f"loss.{path}" if path else "loss", module) for path, module in modules]


def torch_object_ids(model: nn.Module, *losses: Any) -> frozenset[int]:
    """Return ids of modules, parameters and buffers: state that torch itself manages."""
    roots = [model, *(loss for loss in losses if isinstance(loss, nn.Module))]
    return frozenset(id(item) for root in roots for item in (*root.modules(), *root.parameters(), *root.buffers()))


def find_side_effects(
    model: nn.Module,
    losses: Sequence[Any],
    run: Callable[[], Any],
    restore: Callable[[], None],
    run_other: Callable[[], Any] | None = None,
) -> tuple[Any, SideEffects]:
    """Run a loss, and return what the first run returned, and the effects that were seen.

    The caller restores everything afterwards.

    Args:
        model: the user's model, which the loss calls.
        losses: the user's loss, a function or a module; and further functions that a run calls.
        run: performs one forward pass of the loss.
        restore: restores parameters, buffers and random states of GPUs.
        run_other: performs one on another batch of the same form, which may fail; None: there is none.
    """
    scene = _WatchedRun(model, losses)
    old_table, random, watch = scene.digests(), generator_states(), RunWatch(scene.paths, model)
    environment = dict(os.environ)
    with watch.profiling():
        result = run()
    set_keys = [key for key in {**environment, **os.environ} if environment.get(key) != os.environ.get(key)]
    drawn = generators_drawn_from(random, generator_states())
    table = scene.digests()
    # Up to two more runs from the same start: names that changed in the run before and change again are state.
    touched = changing = _changed_names(old_table, table)
    _refuse_forward_only(touched)
    for _ in range(2):
        if changing:
            restore()
            restore_generators(random)
            run()
            digests = scene.digests()
            changing = [name for name in _changed_names(table, digests) if name.key in {item.key for item in changing}]
            table = digests
    changing += _find_state_of_batch(scene, touched, changing, table, restore, run_other)
    effects = list(dict.fromkeys(watch.found))
    effects += [SideEffect("", f"writes the environment's {key}", "", "state") for key in set_keys]
    if changing or drawn:
        restore()
        restore_generators(random)
        tracer = _Tracer(scene, changing, drawn)
        with tracer.tracing():
            run()
        effects += _locate_effects(tracer, changing, drawn)
    read, files = tuple(dict.fromkeys(watch.environment)), tuple(dict.fromkeys(watch.files))
    return result, SideEffects(tuple(effects), tuple(touched), read, files, frozenset(watch.ran))


def _find_state_of_batch(
    scene: _WatchedRun,
    touched: Sequence[PythonName],
    changing: Sequence[PythonName],
    settled: _Table,
    restore: Callable[[], None],
    run_other: Callable[[], Any] | None,
) -> list[PythonName]:
    """Return names that have settled on one batch, and that another batch changes once more: the last loss, say."""
    keys = {name.key for name in changing}
    settled_keys = {name.key for name in touched} - keys
    if not settled_keys or run_other is None:
        return []
    restore()
    try:
        run_other()
    except Exception:  # nobody has said that the loss holds for such a batch
        return []
    changed = [name for name in _changed_names(settled, scene.digests()) if name.key in settled_keys]
    # A tensor in an attribute of a module is what it keeps of its last output, for somebody to look at.
    return [name for name in changed if name.path is None or not isinstance(name.get(), Tensor)]


def _refuse_forward_only(touched: Sequence[PythonName]) -> None:
    """Refuse state that a run has moved and nobody can put back.

    Raises:
        PolylaneError: a generator, or the iterator of a DataLoader, went forward.
    """
    for name in touched:
        if (iterator := find_forward_only(name.get())) is not None:
            kind = "a generator" if isinstance(iterator, types.GeneratorType) else "the iterator of a DataLoader"
            raise PolylaneError(
                f"{name.label} is {kind}, which goes forward in the model or its loss: a capture runs these, and "
                "cannot put it back; keep a list and a position in it, or give the loss what comes from it in the batch"
            )


_Table = Mapping[tuple[int, str], tuple[PythonName, Any]]


def _changed_names(old_table: _Table, table: _Table) -> list[PythonName]:
    entries = {**old_table, **table}
    absent = (0, MISSING)
    return [name for key, (name, _) in entries.items() if old_table.get(key, absent)[1] != table.get(key, absent)[1]]


# ---- locating effects ------------------------------------------------------------------------------------------------


def _locate_effects(tracer: _Tracer, changing: Sequence[PythonName], drawn: Sequence[str]) -> list[SideEffect]:
    """Return what changed in a traced run after which line, in which module."""
    effects = []
    for variable in changing:
        writers = tracer.wrote.get(variable.key, [])
        # A leaf must contain everyone who reads or writes the state, or captured code would read a stale value.
        everyone = {path for path, _ in writers} | tracer.readers(variable)
        path = _common_module(everyone or {variable.path or ""}, tracer.called)
        verb = "draws from" if type(variable.get()).__name__ in ("Generator", "RandomState", "Random") else "writes"
        label = variable.label if variable.kind != "attribute" or variable.path is None else f"self.{variable.name}"
        effects.append(SideEffect(path, f"{verb} {label}", writers[0][1] if writers else "", "state"))
    for name in drawn:
        for path, line in tracer.wrote.get((0, name), [("", "")]):
            effects.append(SideEffect(path, f"draws from {name}", line, "random", tracer.functions.get(line)))
    return list(dict.fromkeys(effects))


class _Tracer:
    """Line tracer: finds the lines after which state differs, and which functions ran inside which modules."""

    def __init__(self, scene: _WatchedRun, changing: Sequence[PythonName], drawn: Sequence[str]) -> None:
        self._paths, self._known = scene.paths, scene.torch_ids
        self._modules = dict(scene.model.named_modules())
        self._changing, self._drawn = changing, drawn
        self._last: tuple[str, str] = ("", "")
        self._ran: set[tuple[types.CodeType, str]] = set()
        self._function: types.FunctionType | None = None
        self.functions: dict[str, types.FunctionType] = {}
        self.called: set[str] = {""}
        self.wrote: dict[tuple[int, str], list[tuple[str, str]]] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        tracer = sys.gettrace()
        self._state = self._read_state()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(tracer)
            self._note_changes()

    def _read_state(self) -> dict[tuple[int, str], Any]:
        digests = StateDigests(self._known)
        state: dict[tuple[int, str], Any] = {name.key: digests.of(name.get()) for name in self._changing}
        if self._drawn:
            states = generator_states()
            state[0, "Python's random"] = states[1]
            state[0, "numpy.random"] = (states[2][2], states[2][1].tobytes()) if len(states) > 2 else None
        return state

    def _note_changes(self) -> None:
        state = self._read_state()
        for key, value in state.items():
            # A change is noticed at the next event: it belongs to the line that ran before.
            if value != self._state[key] and self._last not in self.wrote.setdefault(key, []):
                self.wrote[key].append(self._last)
                if self._function is not None:
                    self.functions[self._last[1]] = self._function
        self._state = state

    def _call(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is CALL:
            path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                self.called.add(path)
        if not is_users(frame.f_code.co_filename) or is_stdlib(frame):
            return None
        self._ran.add((frame.f_code, innermost_module(frame, self._paths)))
        return self._line

    def _line(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        self._note_changes()
        if event == "line":
            self._last = innermost_module(frame, self._paths), line_of_frame(frame)
            self._function = innermost_function(frame) if self._drawn else None
        return self._line

    def readers(self, name: PythonName) -> set[str]:
        """Return the modules in whose calls functions ran that mention a name."""
        named = [(code, path) for code, path in self._ran if name.name in names_in_code(code)]
        return {path for code, path in named if not self._names_own_attribute(code, path, name)}

    def _names_own_attribute(self, code: types.CodeType, path: str, name: PythonName) -> bool:
        """Return whether a function mentions the name only as an attribute of its own, other module, which has it."""
        if name.path in (None, path) or name.name not in self._modules[path].__dict__ or not code.co_argcount:
            return False
        last_step = None
        for step in dis.get_instructions(code):
            reads = step.argval == name.name and step.opname != "STORE_ATTR"  # writers are known already
            of_itself = last_step is not None and last_step.argval == code.co_varnames[0]
            if reads and not (step.opname in ("LOAD_ATTR", "LOAD_METHOD") and of_itself):
                return False
            if step.opname not in ("COPY", "SWAP", "CACHE"):  # these come between self and the attribute
                last_step = step
        return True


def _common_module(paths: set[str], called: set[str]) -> str:
    """Return the path of the innermost module that was called and contains all of these."""
    split = [path.split(".") if path else [] for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    while common and ".".join(common) not in called:
        common.pop()
    return ".".join(common)
