"""Trainings with branches in Python on numbers of the batch, and with parameters that some batches leave out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.equivalence.trainings.coupled_samples import growing_batches
from tests.equivalence.trainings.training import (
    DIVIDED,
    Training,
    classify,
    each,
    perceptron,
    plain_batches,
    seeded,
    training,
)


def once_large() -> list[tuple[Tensor, Tensor]]:
    """As the above, but for a single batch, the third: before and after it nothing is to be seen."""
    batches, ordinary = growing_batches(), plain_batches()
    for step in (1, 3, 4):
        batches[step] = ordinary[step][0].clamp(-1, 1), ordinary[step][1]
    return batches


class Branching(nn.Module):
    """Looks at all of the batch, and doubles what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if x.abs().mean() > 1.2:
            y = y * 2
        return y


@training
def branch_on_batch() -> Training:
    return Training(seeded(Branching), classify, growing_batches)


@training
def branch_taken_once() -> Training:
    return Training(seeded(Branching), classify, once_large)


class Dormant(nn.Module):
    """A part that does nothing until something large comes, and then looks at its whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if (x.abs() > 2.5).any().item():
            x = x - x.mean(0) + 0.1 * self.scale(x)
        return x


@training
def dormant_leaf() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Dormant(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, growing_batches, refusable=DIVIDED)


@training
def dormant_leaf_once() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Dormant(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, once_large, refusable=DIVIDED)


@training
def branching_loss() -> Training:
    """The loss itself looks at what the batch holds."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        if bool((batch[1] == 3).any()):
            losses = losses * torch.where(batch[1] == 3, 2.0, 0.5)
        return losses.mean()

    def batches() -> list[tuple[Tensor, Tensor]]:
        found = plain_batches()
        found[0][1].remainder_(3)
        for _, target in found[1:]:
            target.remainder_(3)[-1] = 3
        return found

    return Training(perceptron(), loss, batches)
