"""Trainings with a gradient in the loss, or with gradients of few rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    RIGHT,
    SIZES,
    Training,
    classify,
    labels,
    perceptron,
    plain_batches,
    seeded,
    training,
)


@training
def gradient_penalty() -> Training:
    """A second derivative, of each sample by itself."""

    def penalized(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        inputs = batch[0].clone().requires_grad_(True)
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + (slope.norm(dim=1) - 1).square().mean()

    return Training(perceptron(), penalized, plain_batches, RIGHT)


@training
def looked_up_rows() -> Training:
    """Sparse gradients of an embedding, of rows that are other ones in every batch."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(40, 6, sparse=True, padding_idx=0), nn.Linear(6, 4)

        def forward(self, text: Tensor) -> Tensor:
            mixed: Tensor = self.out(torch.tanh(self.words(text).mean(1)))
            return mixed

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(labels(step, n, 3, classes=5 + 7 * step), labels(step, n)) for step, n in enumerate(SIZES)]

    def adagrad(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(list(parameters), lr=0.1)

    return Training(seeded(Words), classify, batches, RIGHT, refusable=("data=2,shard=parameters",), optimizer=adagrad)
