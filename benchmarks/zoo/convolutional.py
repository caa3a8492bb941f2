"""Convolutional networks, of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.zoo.entry import CLASSES, Family, classify, images

CONVOLUTIONAL = Family("convolutional", "Convolutional networks")


def from_torchvision(name: str, **how: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        from torchvision import models

        made: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **how)
        return made

    return model


CONVOLUTIONAL.add("mobilenet_v2", "torchvision", from_torchvision("mobilenet_v2", width_mult=0.35), classify, images())
