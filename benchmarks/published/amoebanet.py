"""AmoebaNet-D for images, as a chain of blocks that a pipeline may cut anywhere.

The architecture: Real et al., Regularized Evolution for Image Classifier Architecture Search, 2019, with the sizes of
Huang et al., GPipe, 2019. Where sources differ, it is what torchgpipe measured: the normal cell gives out the states 0,
3, 4 and 6, which is what gives GPipe's numbers of parameters, and all 3x3 pools are averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What a block hands on: what it gives, and what it was given, which the next but one needs.
States = tuple[Tensor, Tensor]
Make = Callable[[int, int], nn.Module]


def convolution(given: int, made: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)) -> nn.Module:
    """ReLU, convolution without a bias that keeps the size but for its stride, batch norm."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(nn.ReLU(), nn.Conv2d(given, made, kernel, stride, padding, bias=False), nn.BatchNorm2d(made))


def pointwise(channels: int, stride: int) -> nn.Module:
    """A 1x1 convolution."""
    return convolution(channels, channels, stride=(stride, stride))


def bottleneck(*kernels: tuple[int, int]) -> Make:
    """Convolutions over a quarter of the channels, between 1x1 ones; each strides where its kernel is wide."""

    def make(channels: int, stride: int) -> nn.Module:
        narrow = channels // 4
        wide = [
            convolution(narrow, narrow, kernel, (stride if kernel[0] > 1 else 1, stride if kernel[1] > 1 else 1))
            for kernel in kernels
        ]
        return nn.Sequential(convolution(channels, narrow), *wide, convolution(narrow, channels))

    return make


def average(channels: int, stride: int) -> nn.Module:
    """A 3x3 pool."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def largest(channels: int, stride: int) -> nn.Module:
    """A 2x2 pool."""
    return nn.MaxPool2d(2, stride)


def same(channels: int, stride: int) -> nn.Module:
    """What is given; with a stride, halved."""
    return nn.Identity() if stride == 1 else Halved(channels, channels)


class Halved(nn.Module):
    """Half the height and width: one half of the channels from even pixels, the other from odd ones."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(given, made // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(given, made // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, given, height, width) -> (samples, made, height / 2, width / 2)."""
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        given: Tensor = self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))
        return given


@dataclass(frozen=True)
class Genotype:
    """How a cell is wired.

    Attributes:
        pairs: each makes a new state, the sum of two operations on earlier states; 0 is what the block before gave,
            1 what the one before that gave.
        gives: states that are put together.
    """

    pairs: tuple[tuple[tuple[int, Make], tuple[int, Make]], ...]
    gives: tuple[int, ...]


SEVENS = bottleneck((1, 7), (7, 1))
NORMAL = Genotype(
    (
        ((1, pointwise), (1, average)),
        ((1, same), (0, SEVENS)),
        ((0, pointwise), (0, SEVENS)),
        ((2, average), (2, same)),
        ((1, average), (5, pointwise)),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, largest), (0, average)),
        ((2, same), (1, bottleneck((3, 3)))),
        ((2, SEVENS), (2, average)),
        ((3, same), (1, largest)),
        ((2, average), (3, pointwise)),
    ),
    (4, 5, 6),
)


@dataclass(frozen=True)
class Before:
    """What a cell follows: channels of the two blocks before it, and whether the last one reduces."""

    last: int
    earlier: int
    reduces: bool


class Cell(nn.Module):
    """A normal or a reduction cell; the latter reads the states from outside with a stride of 2."""

    def __init__(self, genotype: Genotype, before: Before, channels: int) -> None:
        super().__init__()
        stride = 2 if genotype is REDUCTION else 1
        self.genotype = genotype
        self.last = convolution(before.last, channels)
        self.earlier: nn.Module = nn.Identity()
        if before.reduces:
            self.earlier = Halved(before.earlier, channels)
        elif before.earlier != channels:
            self.earlier = convolution(before.earlier, channels)
        self.operations = nn.ModuleList(
            make(channels, stride if index < 2 else 1) for pair in genotype.pairs for index, make in pair
        )

    def forward(self, states: States) -> States:
        """What the two blocks before gave -> the same for the next one."""
        given, earlier = states
        found = [self.last(given), self.earlier(earlier)]
        for i, ((a, _), (b, _)) in enumerate(self.genotype.pairs):
            found.append(self.operations[2 * i](found[a]) + self.operations[2 * i + 1](found[b]))
        return torch.cat([found[i] for i in self.genotype.gives], dim=1), given


class Stem(nn.Module):
    """From images to channels at half the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = convolution(3, channels, (3, 3), (2, 2))

    def forward(self, images: Tensor) -> States:
        """(samples, 3, height, width) -> states, twice the same."""
        x = self.layers(images)
        return x, x


class Classifier(nn.Module):
    """From states to scores of classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(channels, classes)

    def forward(self, states: States) -> Tensor:
        """States -> (samples, classes)."""
        given: Tensor = self.scores(F.avg_pool2d(states[0], 7).flatten(1))
        return given


class AmoebaNet(nn.Module):
    """AmoebaNet-D (layers, filters): a stem of three blocks, three runs of normal cells with a reduction between.

    Args:
        layers: normal cells, of which each run has a third.
        filters: channels of the operations of the first run; they double with each reduction.
        classes: how many.
    """

    def __init__(self, layers: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        if layers % 3:
            raise ValueError(f"layers must be divisible by 3, not {layers}")
        channels = filters // 4
        blocks: list[nn.Module] = [Stem(channels)]
        before = Before(channels, channels, reduces=False)
        run = (NORMAL,) * (layers // 3)
        for genotype in (REDUCTION, REDUCTION, *run, REDUCTION, *run, REDUCTION, *run):
            reduces = genotype is REDUCTION
            channels *= 2 if reduces else 1
            blocks.append(Cell(genotype, before, channels))
            before = Before(channels * len(genotype.gives), before.last, reduces)
        self.blocks = nn.ModuleList([*blocks, Classifier(before.last, classes)])

    def forward(self, images: Tensor) -> Tensor:
        """(samples, 3, 224, 224) -> (samples, classes)."""
        x = images
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of (images, classes)."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)
