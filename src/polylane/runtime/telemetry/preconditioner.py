"""Preconditioned gradients: divided as Adam divides its steps, by the root of its second moments.

Adam does not follow the gradient but the gradient over √v + ε, element by element; its noise scale is that of these
quotients (Qiao et al., OSDI 2021, section 3.1, as in AdaptDL's AdamGradientNoiseScale). An optimizer is known by its
state, not by its class: ``exp_avg_sq`` and ``step`` of a parameter, ``betas`` and ``eps`` of its group.

A step adds (1 - β₂) g² to v before it divides. An element that had hardly any gradient so far (a rare word's) would be
divided by ε otherwise, and count for more than all others: here each v has (1 - β₂) of its tensor's mean v more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polylane.runtime.parameters.optimizer import SumOverMesh

# Second moments of fewer steps say little: before that nothing is preconditioned.
FEWEST_STEPS = 5


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's groups are those of Adam, of its variants, or of an optimizer built like it."""
    groups = optimizer.param_groups
    return bool(groups) and all("betas" in group and "eps" in group for group in groups)


class AdamPreconditioner:
    """Returns by what an optimizer divides the gradients of a parameter.

    Args:
        optimizer: the optimizer of this worker's parameters, with a state for each once it has made a step.
        parameters: what it steps on, by canonical name.
        full_parameters: the same in the shapes that passes compute with; where ZeRO has cut one of them, the state
            of the whole is on no worker, and nothing is known.
        sums: sums of numbers of parameters over all of their shards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        full_parameters: Mapping[str, nn.Parameter],
        sums: SumOverMesh,
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._full_parameters = full_parameters
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._divisors: dict[str, Tensor] = {}
        self._sums, self._means = sums, dict[str, Tensor]()

    def begin_step(self) -> None:
        """Learn the mean second moments of whole parameters; collective over the workers of a replica."""
        states = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
        squares = {name: state["exp_avg_sq"] for name, state in states.items() if "exp_avg_sq" in state}
        device = next((square.device for square in squares.values()), torch.device("cpu"))
        rows = torch.zeros(len(squares), 2, dtype=torch.float64, device=device)
        for row, square in zip(rows, squares.values(), strict=True):
            row[0], row[1] = square.sum(dtype=torch.float64), square.numel()
        totals = self._sums([self._parameters[name] for name in squares], rows)
        self._means = {name: total / count for name, (total, count) in zip(squares, totals, strict=True)}

    def __call__(self, name: str) -> Tensor | None:
        """Return the divisor of a parameter's gradient, of its shape; None where there is none, or not yet.

        Args:
            name: canonical name of the parameter.
        """
        parameter = self._parameters.get(name)
        if parameter is None or parameter is not self._full_parameters.get(name):
            return None
        if name not in self._divisors and (divisor := self._divide(name, parameter)) is not None:
            self._divisors[name] = divisor
        return self._divisors.get(name)

    def _divide(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        group = self._groups.get(id(parameter))
        squares = state.get("exp_avg_sq")
        if group is None or squares is None or squares.shape != parameter.shape:
            return None
        steps = float(state.get("step", 0))
        if steps < FEWEST_STEPS:
            return None
        beta = float(group["betas"][1])
        added = (1 - beta) * self._means[name].to(squares.dtype)
        root = ((squares + added) / (1 - beta**steps)).sqrt_()
        divisor: Tensor = root.add_(group["eps"])
        return divisor
