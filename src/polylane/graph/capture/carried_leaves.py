"""Carried leaves: values of a batch that are no tensors and that its loss never reads, such as names of files.

A capture takes what is no tensor for a constant, so that a batch with another value needs a graph of its own. Which
values are read is found by running the loss on stand-ins: objects that answer every question about their type as the
value would, contain nothing, and record every other use. What was not used by such a run cannot be in its result.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.batch import batch_structure, clone_leaves, leaf_names
from polylane.graph.capture.export import ModelWithLoss, model_restored
from polylane.graph.python_state.own_objects import is_own_or_installed, is_project_file
from polylane.graph.python_state.run_watch import RunWatch

ROUNDS = 8  # runs with fewer and fewer stand-ins; leaves of more groups than that are taken to be read
# Compared by identity (``is None``, ``is Kind.TRAIN``), which leaves no trace, or called.
_BY_IDENTITY = (bool, type(None), enum.Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_CONSTRUCTION = "new init class getattribute setattr delattr del init_subclass subclasshook class_getitem dir"
_DEFINED = {f"__{name}__" for name in f"{_CONSTRUCTION} copy deepcopy".split(" ")}
# What a value is asked even where its type does not define it, by operators and by conversions in C.
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor"
_QUESTIONS = "eq ne lt le gt ge hash bool len iter next contains getitem str repr format bytes fspath"
_NUMBERS = "int float complex index array buffer"
_ASKED = [f"__{r}{name}__" for r in ("", "r") for name in _OPERATORS.split(" ")]
_ASKED += [f"__{name}__" for name in f"{_QUESTIONS} {_NUMBERS}".split(" ")]


class _IsRead(Exception):
    """A stand-in was used."""


class _StandInWatch(RunWatch):
    """Profiler that also records whether a function in C raised, for the user may catch what it says of a stand-in."""

    caught = False

    def _on_event(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_exception" and is_own_or_installed(frame.f_code.co_filename):
            self.caught = True
        super()._on_event(frame, event, function)


def find_carried_leaves(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], batch: Any, ran: frozenset[Any]
) -> dict[int, Any]:
    """Return the leaves that are no tensors and whose values the loss does not read, by position.

    Args:
        model_with_loss: model and loss, in the mode that is captured; unchanged afterwards.
        leaves: flat leaves of the batch.
        batch: the batch itself, whose nesting counts: leaves of one list or mapping are read together.
        ran: code of the functions that ran on the batch itself.
    """
    plain = {i for i, leaf in enumerate(leaves) if not isinstance(leaf, (Tensor, *_BY_IDENTITY)) and not callable(leaf)}
    if not plain:
        return {}
    groups = [name.rpartition("[")[0] for name in leaf_names(batch_structure(batch))]
    for _ in range(ROUNDS):
        read = _find_read(model_with_loss, leaves, plain, ran)
        if not read:
            return {i: leaves[i] for i in plain}
        plain -= {i for i in plain if groups[i] in {groups[position] for position in read}}
        if not plain:
            break
    return {}


def _find_read(model_with_loss: ModelWithLoss, leaves: Sequence[Any], plain: set[int], ran: frozenset[Any]) -> set[int]:
    """Run the loss with stand-ins; return those that were used, or all of them if the run is another one with them."""
    read = set[int]()
    inputs = [_stand_in(leaf, i, read) if i in plain else leaf for i, leaf in enumerate(clone_leaves(leaves))]
    watch, mean = _StandInWatch({}, model_with_loss.model), model_with_loss.mean
    with model_restored(model_with_loss), torch.enable_grad(), watch.profiling():
        try:
            model_with_loss(*inputs)
        except Exception:  # of a stand-in, or of a function in C that was given one
            return read or plain
        finally:
            model_with_loss.mean = mean
    if watch.caught:
        return read or plain
    functions = {code for code in watch.ran if is_project_file(code.co_filename)}
    # ``type(value)`` cannot be seen by a stand-in: it shows in the code, or in the functions that are called.
    if functions != {code for code in ran if is_project_file(code.co_filename)}:
        return plain
    return plain if any(map(_asks_type, functions)) else read


def _asks_type(code: types.CodeType) -> bool:
    loads = (step for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return any(step.argval == "type" for step in loads)


def _stand_in(value: Any, position: int, read: set[int]) -> Any:
    """Return an object of which nothing is known but the type of a value.

    Args:
        value: the value in whose place it is.
        position: the leaf's position in the batch.
        read: gets the position when the object is used.
    """
    kind = type(value)

    def use(*_: Any, **__: Any) -> Any:
        read.add(position)
        raise _IsRead(position)

    def get(self: Any, name: str) -> Any:
        if name == "__class__":
            return kind
        if name in ("__copy__", "__deepcopy__"):
            return lambda *_: self
        if not hasattr(kind, name) and not hasattr(value, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        # A method that is only looked for says no more than the type does.
        return use if callable(getattr(kind, name, None)) else use()

    body: dict[str, Callable[..., Any]] = dict.fromkeys(_ASKED, use)
    for name in dir(kind):
        if name.startswith("__") and name not in _DEFINED:
            # dir() lists names that a metaclass then refuses, such as __abstractmethods__.
            with contextlib.suppress(AttributeError):
                if callable(getattr(kind, name)):
                    body[name] = use
    body |= {"__getattribute__": get, "__setattr__": use, "__delattr__": use}
    return type(kind.__name__, (), body)()
