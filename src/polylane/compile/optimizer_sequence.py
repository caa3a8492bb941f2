"""Optimizer sequence: several optimizers that each have some of the parameters, and step in turn, as one optimizer.

A script that takes Muon for its matrices and AdamW for the rest has a list of two, and steps each. What reads groups
and states of an optimizer sees those of all; what asks for the user's own gets the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError


class OptimizerSequence(torch.optim.Optimizer):
    """Optimizers that step in turn.

    Args:
        optimizers: the user's optimizers; no two have a parameter in common.

    Attributes:
        optimizers: a list of its own with the user's optimizers, in their order.
        step_one: steps one of the optimizers; others may set it, to step each in their way.

    Raises:
        PolylaneError: the list is empty, or two of them have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Without that of torch, which makes groups and states of its own.
        self.optimizers = list(optimizers)
        self.step_one: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step()
        self.state = _SharedState(self.optimizers)  # type: ignore[assignment]
        if not self.optimizers:
            raise PolylaneError("optimizer(parameters) returns an empty list: there is nothing to train with")
        parameter_ids = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(parameter_ids)) < len(parameter_ids):
            raise PolylaneError("two of the optimizers that optimizer(parameters) returns have the same parameter")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        for optimizer in self.optimizers:
            self.step_one(optimizer)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that is called before the first of the optimizers steps."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["optimizers"])  # type: ignore[misc]

    def __repr__(self) -> str:
        return repr(self.optimizers)


class _SharedState(MutableMapping[Tensor, Any]):
    """The states of several optimizers: each parameter's in the optimizer that has it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        groups = ((optimizer, group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        owner = next(
            (optimizer for optimizer, parameters in groups if any(candidate is parameter for candidate in parameters)),
            self._optimizers[0],
        )
        owner.state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                del optimizer.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


class SchedulerSequence:
    """Learning-rate schedulers that step in turn.

    Args:
        schedulers: the user's schedulers, of one optimizer or of several.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all schedulers to those that :meth:`state_dict` returned."""
        for scheduler, scheduler_state in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(scheduler_state)


@dataclass(frozen=True)
class JoinedFactory:
    """A user's optimizer factory, whose list of optimizers is one.

    Attributes:
        factory: the user's function of (name, parameter) pairs.
        outside: parameters that the factory knows by itself, with the names that they have here; they are not given to
            it. What is given to this function under such a name takes the parameter's place.
    """

    factory: Callable[[Any], Any]
    outside: tuple[tuple[str, nn.Parameter], ...] = ()

    def __call__(self, parameters: Any) -> Any:
        if not self.outside:
            return join_optimizers(self.factory(parameters))
        names, arguments = {name for name, _ in self.outside}, dict(parameters)
        optimizer = join_optimizers(self.factory([(name, p) for name, p in arguments.items() if name not in names]))
        if isinstance(optimizer, torch.optim.Optimizer):
            replaced = {id(p): arguments.get(name) for name, p in self.outside}
            for group in optimizer.param_groups:
                new_parameters = [replaced.get(id(p), p) for p in group["params"]]
                group["params"] = [p for p in new_parameters if p is not None]
            for _, parameter in self.outside:
                stand_in = replaced[id(parameter)]
                if stand_in is not parameter and parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    if stand_in is not None and stand_in.shape == parameter.shape:
                        optimizer.state[stand_in] = state
        return optimizer


def join_optimizers(optimizers: Any) -> Any:
    """Return a list of optimizers as one; anything else as it is."""
    if isinstance(optimizers, list | tuple) and all(isinstance(item, torch.optim.Optimizer) for item in optimizers):
        return OptimizerSequence(optimizers)
    return optimizers


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the user's optimizers: those of a sequence, or the one that there is."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerSequence) else [optimizer]


def schedulers_in(scheduler: Any) -> list[Any]:
    """Return the user's schedulers: those of a sequence, the one that there is, or none."""
    if scheduler is None:
        return []
    return scheduler.schedulers if isinstance(scheduler, SchedulerSequence) else [scheduler]


def as_given(optimizer: torch.optim.Optimizer) -> Any:
    """Return what the user's factory returned: a list of optimizers, or one."""
    return optimizer.optimizers if isinstance(optimizer, OptimizerSequence) else optimizer
