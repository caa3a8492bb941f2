"""A recipe of two classes of points, to which a test adds metrics or callbacks of its own."""

from __future__ import annotations

BINARY = """
import torch
from torch import nn

import polylane


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).flatten(), batch[1])


def optimizer(parameters, lr=0.5):
    return torch.optim.SGD(parameters, lr=lr)


def data(split):
    generator = torch.Generator().manual_seed(len(split))
    x = torch.randn(40 if split == "train" else 19, 4, generator=generator)
    return list(zip(x, (x.sum(1) > 0).float()))
"""
