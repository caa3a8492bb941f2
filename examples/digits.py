"""A small residual network with BatchNorm on scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels).

polylane train examples/digits.py --workers 4 --plan data=2,pipeline=2 --epochs 4
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Residual(nn.Module):
    """Two convolutions around a shortcut; the first may halve the image and widen the channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = self.stage(width, width, blocks, stride=1)
        self.layer2 = self.stage(width, 2 * width, blocks, stride=2)
        self.layer3 = self.stage(2 * width, 4 * width, blocks, stride=2)
        self.fc = nn.Linear(4 * width, 10)

    @staticmethod
    def stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = Residual(channels_in, channels, stride)
        return nn.Sequential(first, *(Residual(channels, channels, stride=1) for _ in range(blocks - 1)))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


def model(width: int = 32, blocks: int = 2) -> nn.Module:
    return ResNet(width, blocks)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": model(images).argmax(dim=1) == labels}


def optimizer(parameters, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 1e-4):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


def data(split: str) -> TensorDataset:
    """Images in [0, 1] and their labels: four fifths to train on, one fifth to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[: len(order) * 4 // 5] if split == "train" else order[len(order) * 4 // 5 :]
    return TensorDataset(images[chosen], labels[chosen])
