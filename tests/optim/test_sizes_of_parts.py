"""Optimizers that go by a parameter's size: equal to one device by plans that cut parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.workers.training import assert_same, batch_of, mlp, plainly, trained

BATCHES = [batch_of(8, seed) for seed in range(2)]


class FactorsLarge(torch.optim.SGD):
    """Divides by the means of rows from a length on, as Adafactor of transformers (128) and timm (16) do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() > 1 and min(p.shape) >= 8:
                p.grad = p.grad / (p.grad.square().mean(0, keepdim=True).sqrt() + 1e-3)
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


def factors(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return FactorsLarge([p for _, p in parameters], lr=0.1)


@pytest.mark.parametrize("plan", ["tensor=2", "data=2,shard=parameters"])
def test_parameters_past_the_size_stay_whole(plan: str) -> None:
    model = mlp(6, 16, 12, 4)
    reference = plainly(model, BATCHES, optimizer=factors)
    for worker in trained(model, plan, BATCHES, optimizer=factors):
        assert_same(worker, reference)
