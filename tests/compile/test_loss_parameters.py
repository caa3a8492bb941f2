"""Parameters that a loss reads from outside of the model: found by name, copied with the loss, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.loss_parameters import LossWithParameters, adopt_loss_parameters
from polylane.compile.objectives import Objective, find_held_names, named_parameters
from polylane.errors import PolylaneError
from tests.support.workers.training import mlp

CENTERS = nn.Parameter(torch.ones(4))
CRITERION = nn.Linear(4, 1)


class Holder:
    """An object that is a loss, with a criterion among its attributes."""

    def __init__(self) -> None:
        self.criterion = nn.Linear(4, 1)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.criterion(model(batch)).mean()


def by_global(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) * CENTERS).mean()


def by_helper(model: nn.Module, batch: Tensor) -> Tensor:
    return apply_criterion(model(batch))


def apply_criterion(output: Tensor) -> Tensor:
    return CRITERION(output).mean()


def closed_over(weight: nn.Parameter) -> Any:
    return lambda model, batch: (model(batch) * weight).mean()


HOLDER, WEIGHT = Holder(), nn.Parameter(torch.ones(4))
LOSSES: list[tuple[Any, list[nn.Parameter], list[str]]] = [
    (by_global, [CENTERS], ["loss.CENTERS"]),
    (by_helper, list(CRITERION.parameters()), ["loss.CRITERION.weight", "loss.CRITERION.bias"]),
    (HOLDER, [HOLDER.criterion.weight], ["loss.criterion.weight"]),
    (closed_over(WEIGHT), [WEIGHT], ["loss.weight"]),
]


@pytest.mark.parametrize(("loss", "own", "names"), LOSSES)
def test_what_a_loss_reads_by_name_is_held_and_copied(loss: Any, own: list[nn.Parameter], names: list[str]) -> None:
    model = mlp(6, 4).float()

    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*(p for _, p in parameters), *own], lr=0.1)

    objective = adopt_loss_parameters(model, Objective("loss", loss, factory))
    named = named_parameters(model, [objective.loss])
    assert list(find_held_names(named, objective.optimizer)) == ["0.weight", "0.bias", *names]
    # Stand-ins take the places of what the factory knows by itself.
    others = {name: nn.Parameter(p.detach().clone()) for name, p in named}
    built = objective.optimizer(list(others.items()))
    taken = {id(p) for group in built.param_groups for p in group["params"]}
    assert taken >= {id(others[name]) for name in names} and taken.isdisjoint(map(id, own))
    # A copy computes with its own values, and leaves those of the original where they are.
    other, batch = copy.deepcopy(objective.loss), torch.ones(2, 6)
    assert isinstance(other, LossWithParameters)
    before = loss(model, batch).item()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(model, batch).item() == 0 and loss(model, batch).item() == before == objective.loss(model, batch)


def test_what_no_loss_reads_is_refused() -> None:
    stray = nn.Parameter(torch.ones(3))
    objective = Objective("loss", by_global, lambda named: torch.optim.SGD([*(p for _, p in named), stray], lr=0.1))
    with pytest.raises(PolylaneError, match=r"takes a parameter of shape \[3\] that it is not given"):
        adopt_loss_parameters(mlp(6, 4), objective)
