"""Weights whose memory is not in the order of their dimensions, with optimizers that walk over memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import subsets
from tests.support.workers.training import assert_same, plainly, trained


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=0.01, fused=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3)).to(
        memory_format=torch.channels_last
    )
    linear = nn.Linear(5, 4)
    linear.weight = nn.Parameter(torch.randn(5, 4).t())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


BATCHES = [(torch.randn(6, 3, 6, 6, dtype=torch.float64), torch.randint(0, 4, (6,))) for _ in range(3)]


@pytest.mark.parametrize(
    "plan",
    subsets.one_in(
        2,
        [
            "data=2",
            "data=2,microbatches=2",
            "pipeline=2,microbatches=2",
            "tensor=2",
            "data=2,tensor=2",
            "data=2,every=1",
            "data=2,compress=powersgd:9:0",
            "data=2,compress=top_k:1",
            "data=2,shard=optimizer",
            "data=2,shard=gradients",
            "data=2,shard=parameters",
            "data=2,servers=1",
        ],
    ),
)
def test_a_fused_optimizer(plan: str) -> None:
    count = 2 if "microbatches" in plan else 1
    expected = plainly(model(), BATCHES, loss=loss, optimizer=fused, microbatches=count)
    for worker in trained(model(), plan, BATCHES, loss=loss, optimizer=fused):
        assert_same(worker, expected, 1e-9)
