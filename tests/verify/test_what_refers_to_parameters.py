"""A proof runs the user's own model: what refers to its parameters from outside takes part, as in training."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from polylane.compile.objectives import build_objectives
from polylane.verify.verify import verify
from tests.support.workers.training import batch_of, classify

BATCH = batch_of(8)[0].float(), batch_of(8)[1]
OPTIMIZERS: dict[int, torch.optim.Optimizer] = {}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def stepped_in_hooks(by_table: bool) -> nn.Module:
    """An optimizer for each parameter, which a hook steps once the gradient is complete."""
    model = net()
    for parameter in model.parameters():
        own = OPTIMIZERS[id(parameter)] = torch.optim.SGD([parameter], lr=0.5)

        def hook(parameter: Any, own: Any = own) -> None:
            (OPTIMIZERS[id(parameter)] if by_table else own).step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return model


class Locked(nn.Module):
    """It cannot be copied, and a closure has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.lock = net(), threading.Lock()
        weight = self.layers[0].weight
        self.penalty = lambda: weight.square().mean()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) * (1 + self.penalty())
        return y


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.0)


def moving(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.5)


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [(lambda: stepped_in_hooks(False), still), (lambda: stepped_in_hooks(True), still), (Locked, moving)],
    ids=["hooks", "hooks by a table", "closures"],
)
def test_it_takes_part_and_the_model_is_as_it_was(make: Any, optimizer: Any) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (objective,) = build_objectives(classify, optimizer, None).values()
    verdict = verify(model, objective, [BATCH, BATCH], "data=2")
    (first, _), (second, _) = verdict.losses
    assert verdict.passed and first - second > 1e-2, "the second step has what the first one trained"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32
