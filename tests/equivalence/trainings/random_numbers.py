"""Trainings that draw random numbers: dropout, dropped layers, noise of numpy."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    BY_PASS,
    BY_SAMPLE,
    PLANS,
    STATE,
    Training,
    classify,
    plain_batches,
    seeded,
    training,
)
from tests.equivalence.trainings.uncounted_labels import partly_ignored


@training
def dropout() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))

    return Training(seeded(model), classify, partly_ignored, STATE, draws=BY_SAMPLE)


class Drops(nn.Module):
    """Leaves layers out by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            if random.random() > 0.5:
                y = y + torch.tanh(layer(y))
        z: Tensor = self.last(y)
        return z


@training
def dropped_layers() -> Training:
    return Training(seeded(Drops), classify, plain_batches, STATE, refusable=PLANS, draws=BY_PASS)


class Noisy(nn.Module):
    """Scales by numpy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * float(np.random.uniform(0.5, 1.5)))
        return y


@training
def noise_by_numpy() -> Training:
    return Training(seeded(Noisy), classify, plain_batches, STATE, refusable=PLANS, draws=BY_PASS)
