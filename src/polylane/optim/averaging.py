"""Averages of the weights: an exponential moving average that is tested and saved in place of the weights.

torch's ``swa_utils.AveragedModel`` is a second model, which a training that is split over workers would have to split
again. Here the average is a part of the optimizer's state, beside the moments of Adam: so it is sharded, saved and
resumed as these are. The optimizer gets ``train()`` and ``eval()``, which exchange weights and average, as
schedule-free methods have (:mod:`.modes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError

AVERAGE = "average"  # key of a parameter's state
DECAY = "average_decay"  # attribute of the optimizer
IS_AVERAGED = "is_averaged"  # key of a group: whether its parameters are the averages now


class _Averaging(torch.optim.Optimizer):
    """What an optimizer's class gets in front of its own methods.

    Attributes:
        average_decay: part of the average that remains in a step.
    """

    average_decay: float

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step, and move the average: at first it is the weights themselves."""
        result = super().step(closure)
        averages, weights = list[Tensor](), list[Tensor]()
        for parameter in self._parameters():
            state = self.state[parameter]
            if AVERAGE in state:
                averages.append(state[AVERAGE])
                weights.append(parameter)
            else:
                state[AVERAGE] = parameter.detach().clone()
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.average_decay)
        return result

    def train(self) -> None:
        """Let the parameters be the weights that are trained."""
        self._exchange(False)

    def eval(self) -> None:
        """Let the parameters be the averages."""
        self._exchange(True)

    @torch.no_grad()
    def _exchange(self, averages: bool) -> None:
        for group in self.param_groups:
            if group.get(IS_AVERAGED, False) is averages:
                continue
            group[IS_AVERAGED] = averages
            for parameter in group["params"]:
                if (average := self.state.get(parameter, {}).get(AVERAGE)) is not None:
                    weight = parameter.detach().clone()
                    parameter.copy_(average)
                    average.copy_(weight)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def averaged_optimizer(
    factory: Callable[[Any], torch.optim.Optimizer], decay: float
) -> Callable[[Any], torch.optim.Optimizer]:
    """Wrap a recipe's ``optimizer(parameters)`` so that it keeps an exponential moving average of the weights.

    Args:
        factory: from (name, parameter) pairs to an optimizer, or several.
        decay: part of the average that remains in a step, from 0 to below 1.

    Returns:
        A function of parameters, as the factory is; its optimizers have ``train()`` and ``eval()``, which exchange
        weights and averages.

    Raises:
        PolylaneError: the decay is not in that range.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> model = torch.nn.Linear(8, 3)
        >>> averaged = optim.averaged_optimizer(torch.optim.Adam, 0.999)(model.parameters())
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> averaged.step()
        >>> averaged.eval()  # model has the averages now
        >>> averaged.train()  # and the weights again
    """
    if not 0 <= decay < 1:
        raise PolylaneError(f"--ema {decay:g}: give the part of the average that remains in a step, such as 0.999")
    return functools.partial(_build_averaged, factory, decay)


def _build_averaged(factory: Callable[[Any], torch.optim.Optimizer], decay: float, parameters: Any) -> Any:
    optimizer = factory(parameters)
    for member in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if isinstance(member, torch.optim.Optimizer):  # anything else is refused by the caller, with a better message
            member.__class__ = _class_with_average(type(member))  # type: ignore[arg-type]  # a class is hashable
            setattr(member, DECAY, decay)
            for group in member.param_groups:
                group[IS_AVERAGED] = False
    return optimizer


@functools.cache
def _class_with_average(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class of optimizers that keep an average, and are else those of a class.

    Raises:
        PolylaneError: these exchange their weights themselves.
    """
    if callable(getattr(base, "eval", None)):
        raise PolylaneError(f"--ema: {base.__name__} gives averaged weights by itself, with its train() and eval()")
    return type(base.__name__, (_Averaging, base), {"__module__": base.__module__})
