"""Networks that scripts take from packages, small ones of their kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        out: Tensor = self.relu(x)
        return out


class ResNet(nn.Module):
    """ResNet-18: its layers in their order."""

    def __init__(self, weights: Any = None, classes: int = 1000, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            inputs, outputs = widths[number - 1 : number + 1]
            layer = nn.Sequential(Block(inputs, outputs, 1 if number == 1 else 2), Block(outputs, outputs, 1))
            self.add_module(f"layer{number}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def create_model(name: str, pretrained: bool, num_classes: int) -> Any:
    """Stand-in for ``timm.create_model``."""
    model: Any = ResNet(classes=num_classes, width=4)
    model.default_cfg = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    model.get_classifier = lambda: model.fc
    return model


def vgg16(weights: Any = None) -> Any:
    """VGG-16's features: its convolutions in their order, narrow."""
    layers, inputs = list[nn.Module](), 3
    for width, count in ((4, 2), (8, 2), (8, 3), (8, 3), (8, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    return SimpleNamespace(features=nn.Sequential(*layers))
