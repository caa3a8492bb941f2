"""A small Inception network with BatchNorm: branches side by side, concatenated, on handwritten digits.

polylane train examples/inception.py --workers 2 --plan pipeline=2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from digits import data, loss  # the recipe next to this one: the same images, the same loss

__all__ = ["data", "loss", "model", "optimizer"]


def convolution(channels_in: int, channels: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class Inception(nn.Module):
    """Four views of one image: a point, its surroundings, their surroundings, and the maximum of them."""

    def __init__(self, channels_in: int, width: int) -> None:
        super().__init__()
        self.point = convolution(channels_in, width, 1)
        self.near = nn.Sequential(convolution(channels_in, width, 1), convolution(width, width, 3))
        self.far = nn.Sequential(
            convolution(channels_in, width, 1), convolution(width, width, 3), convolution(width, width, 3)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), convolution(channels_in, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.near(x), self.far(x), self.pooled(x)], dim=1)


class InceptionNet(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = convolution(1, width, 3)
        self.blocks = nn.ModuleList(Inception(width if i == 0 else 4 * width, width) for i in range(blocks))
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == len(self.blocks) // 2:
                x = F.max_pool2d(x, 2)
        return self.fc(x.mean(dim=(2, 3)))


def model(width: int = 16, blocks: int = 4) -> nn.Module:
    return InceptionNet(width, blocks)


def optimizer(parameters, lr: float = 3e-3, weight_decay: float = 0.01):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
