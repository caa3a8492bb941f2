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
        found: what it reads, by a name of its own, with the place where it finds it.
    """

    def __init__(self, function: Callable[..., Any], found: Mapping[str, tuple[PythonName, Any]]) -> None:
        super().__init__()
        self.function = function
        self.places = _Places({key: place for key, (place, _) in found.items()})
        for key, (_, value) in found.items():
            setattr(self, key, value)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the user's loss, computed with this module's parameters."""
        with self._installed():
            return self.function(model, batch)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        changed = []
        for key, place in self.places.items():
            before, own = place.get(), getattr(self, key)
            if before is not own:
                changed.append((place, before))
                place.put(own)
        try:
            yield
        finally:
            for place, before in changed:
                place.put(before)


class _Places(dict[str, PythonName]):
    """Places by name; a copy of the loss finds its parameters in the same."""

    def __deepcopy__(self, memo: Any) -> _Places:
        return self


def adopt_loss_parameters(model: nn.Module, objective: Objective) -> Objective:
    """Return an objective whose loss has the parameters that its optimizer takes and the model does not have.

    Raises:
        PolylaneError: nothing that the loss reads by name has such a parameter; or the loss is a module of its own.
    """
    loss, given = objective.loss, join_optimizers(objective.optimizer)
    if isinstance(loss, LossWithParameters):
        return objective
    known = named_parameters(model, [loss])
    try:
        optimizer = given if isinstance(given, torch.optim.Optimizer) else given(list(known))
        taken = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    except Exception:  # told where the optimizer is built for good
        return objective
    own = {id(parameter) for _, parameter in known}
    outside = {id(parameter): parameter for parameter in taken if id(parameter) not in own}
    if not outside:
        return objective
    found = {} if isinstance(loss, nn.Module) else _find_places(loss, outside.keys())
    adopted = LossWithParameters(loss, found) if found else None
    named = {id(parameter): f"loss.{name}" for name, parameter in adopted.named_parameters()} if adopted else {}
    for parameter in (parameter for key, parameter in outside.items() if key not in named):
        if not isinstance(given, torch.optim.Optimizer):  # of an object its own names are told
            raise PolylaneError(
                f"optimizer(parameters) takes a parameter of shape {list(parameter.shape)} that it is not given, and "
                "loss(model, batch) is not seen to read it by a name: let the model have it (a copy of a parameter is "
                "never trained)"
            )
        return objective
    assert adopted is not None
    if not isinstance(given, JoinedFactory):  # an object has its parameters already
        return replace(objective, loss=adopted)
    names = tuple((named[key], parameter) for key, parameter in outside.items())
    # Other parameters of a criterion, which its optimizer does not have, stay what they are.
    others = tuple((f"loss.{name}", p) for name, p in adopted.named_parameters() if id(p) not in outside)
    return replace(objective, loss=adopted, optimizer=replace(given, outside=(*names, *others)))


def _find_places(loss: Any, wanted: Any) -> dict[str, tuple[PythonName, Any]]:
    """Return where a loss finds parameters of these ids, or modules that have some, by a name for each."""
    found: dict[str, tuple[PythonName, Any]] = {}
    seen, reached = set[int](), set[int]()

    def add(place: PythonName, value: Any) -> None:
        if id(value) in reached:
            return
        reached.add(id(value))
        key = place.name
        while key in found or hasattr(nn.Module, key) or key in ("function", "places"):
            key += "_"
        found[key] = place, value

    def look(place: PythonName, depth: int) -> None:
        value = place.get()
        if isinstance(value, nn.Parameter):
            if id(value) in wanted:
                add(place, value)
        elif isinstance(value, nn.Module):
            if any(id(parameter) in wanted for parameter in value.parameters()):
                add(place, value)
        else:
            follow(value, depth + 1)

    def follow(value: Any, depth: int) -> None:
        if depth > _DEPTH or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                follow(each, depth)
        elif isinstance(value, types.MethodType):
            follow(value.__self__, depth)
            follow(value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            for place in _list_names(value):
                look(place, depth)
        elif is_of_project_class(value) and not isinstance(value, type | nn.Module):
            for name in list(getattr(value, "__dict__", {})):
                look(PythonName(value, name, f"{type(value).__name__}.{name}", "attribute"), depth)
            follow(vars(type(value)).get("__call__"), depth)

    follow(loss, 0)
    return found


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
