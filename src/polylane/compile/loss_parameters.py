"""Parameters outside of the model that the loss reads and the optimizer takes: centres of classes, a criterion's own.

A loss function knows them by name: a global, a variable of a closure, an attribute of an object. Here the function
becomes a module that has them, as "loss.centers" or "loss.criterion.weight": then they are captured, placed, trained,
cut and saved as all others. Where other tensors stand for them in a pass, the function finds these under its own names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polylane.compile.objectives import Objective, named_parameters
from polylane.compile.optimizer_sequence import JoinedFactory, join_optimizers
from polylane.errors import PolylaneError
from polylane.graph.python_state.own_objects import is_filled, is_of_project_class, is_project_file, names_in_code
from polylane.graph.python_state.state import PythonName

_DEPTH = 4  # of functions and objects that a loss reaches by name


class LossWithParameters(nn.Module):
    """A loss function with the parameters, and modules that have parameters, which it reads from outside of the model.

    Args:
        function: the user's loss, of model and batch.
        named_values: what it reads, by a name of its own, with the place where it finds it.
    """

    def __init__(self, function: Callable[..., Any], named_values: Mapping[str, tuple[PythonName, Any]]) -> None:
        super().__init__()
        self.function = function
        self.places = _Places({key: python_name for key, (python_name, _) in named_values.items()})
        for key, (_, value) in named_values.items():
            setattr(self, key, value)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the user's loss, computed with this module's parameters."""
        with self._installed():
            return self.function(model, batch)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        changed = []
        for key, python_name in self.places.items():
            old_value, value = python_name.get(), getattr(self, key)
            if old_value is not value:
                changed.append((python_name, old_value))
                python_name.put(value)
        try:
            yield
        finally:
            for python_name, old_value in changed:
                python_name.put(old_value)


class _Places(dict[str, PythonName]):
    """Places by name; a copy of the loss finds its parameters in the same."""

    def __deepcopy__(self, memo: Any) -> _Places:
        return self


def adopt_loss_parameters(model: nn.Module, objective: Objective) -> Objective:
    """Return an objective whose loss has the parameters that its optimizer takes and the model does not have.

    Raises:
        PolylaneError: nothing that the loss reads by name has such a parameter; or the loss is a module of its own.
    """
    loss, factory = objective.loss, join_optimizers(objective.optimizer)
    if isinstance(loss, LossWithParameters):
        return objective
    model_parameters = named_parameters(model, [loss])
    try:
        optimizer = factory if isinstance(factory, torch.optim.Optimizer) else factory(list(model_parameters))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    except Exception:  # told where the optimizer is built for good
        return objective
    known_ids = {id(parameter) for _, parameter in model_parameters}
    extras = {id(parameter): parameter for parameter in parameters if id(parameter) not in known_ids}
    if not extras:
        return objective
    named_values = {} if isinstance(loss, nn.Module) else _find_places(loss, extras.keys())
    adopted = LossWithParameters(loss, named_values) if named_values else None
    named = {id(parameter): f"loss.{name}" for name, parameter in adopted.named_parameters()} if adopted else {}
    for parameter in (parameter for key, parameter in extras.items() if key not in named):
        if not isinstance(factory, torch.optim.Optimizer):  # of an object its own names are told
            raise PolylaneError(
                f"optimizer(parameters) takes a parameter of shape {list(parameter.shape)} that it is not given, and "
                "loss(model, batch) is not seen to read it by a name: let the model have it (a copy of a parameter is "
                "never trained)"
            )
        return objective
    assert adopted is not None
    if not isinstance(factory, JoinedFactory):  # an object has its parameters already
        return replace(objective, loss=adopted)
    names = tuple((named[key], parameter) for key, parameter in extras.items())
    # Other parameters of a criterion, which its optimizer does not have, stay what they are.
    other_parameters = tuple((f"loss.{name}", p) for name, p in adopted.named_parameters() if id(p) not in extras)
    return replace(objective, loss=adopted, optimizer=replace(factory, outside=(*names, *other_parameters)))


def _find_places(loss: Any, ids: Any) -> dict[str, tuple[PythonName, Any]]:
    """Return where a loss finds parameters of these ids, or modules that have some, by a name for each."""
    named_values: dict[str, tuple[PythonName, Any]] = {}
    seen_ids, reached = set[int](), set[int]()

    def add(python_name: PythonName, value: Any) -> None:
        if id(value) in reached:
            return
        reached.add(id(value))
        key = python_name.name
        while key in named_values or hasattr(nn.Module, key) or key in ("function", "places"):
            key += "_"
        named_values[key] = python_name, value

    def look(python_name: PythonName, depth: int) -> None:
        value = python_name.get()
        if isinstance(value, nn.Parameter):
            if id(value) in ids:
                add(python_name, value)
        elif isinstance(value, nn.Module):
            if any(id(parameter) in ids for parameter in value.parameters()):
                add(python_name, value)
        else:
            follow(value, depth + 1)

    def follow(value: Any, depth: int) -> None:
        if depth > _DEPTH or id(value) in seen_ids:
            return
        seen_ids.add(id(value))
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                follow(part, depth)
        elif isinstance(value, types.MethodType):
            follow(value.__self__, depth)
            follow(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            for python_name in _list_names(value):
                look(python_name, depth)
        elif is_of_project_class(value) and not isinstance(value, type | nn.Module):
            for name in list(getattr(value, "__dict__", {})):
                look(PythonName(value, name, f"{type(value).__name__}.{name}", "attribute"), depth)
            follow(vars(type(value)).get("__call__"), depth)

    follow(loss, 0)
    return named_values


def _list_names(function: types.FunctionType) -> Iterator[PythonName]:
    """Yield the globals and variables of closures that a function of the user's mentions."""
    code = function.__code__
    if not is_project_file(code.co_filename):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell):
            yield PythonName(cell, name, f"{name} of {function.__qualname__}", "variable")
    for name in sorted(names_in_code(code) & function.__globals__.keys()):
        yield PythonName(function.__globals__, name, f"the global {name}", "global")
