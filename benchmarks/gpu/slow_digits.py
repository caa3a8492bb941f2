"""A recipe whose training takes some seconds: batch normalization, dropout and AdamW in float64; samples are slow."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, CLASSES, SECONDS = 16, 5, 0.002  # for a sample to be read


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """Random samples, each of which takes a while."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= len(self):
            raise IndexError(index)
        time.sleep(SECONDS)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator, dtype=torch.float64), index % CLASSES


def model() -> nn.Module:
    layers = [nn.Linear(WIDTH, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers).double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-3)


def data(split: str) -> Dataset[tuple[Tensor, int]]:
    return SlowSamples()
