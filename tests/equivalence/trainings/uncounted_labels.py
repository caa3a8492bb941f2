"""Trainings in which some labels do not count: ignored ones, padding, classes of other weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    IGNORED,
    LATER,
    SIZES,
    Training,
    adamw,
    chances,
    classify,
    features,
    labels,
    perceptron,
    plain_batches,
    seeded,
    training,
)


def partly_ignored() -> list[tuple[Tensor, Tensor]]:
    """All labels count at first and at last; between, some do not."""
    batches = plain_batches()
    for step, (_, target) in enumerate(batches[1:4], 1):
        ignored = chances(step, len(target)) < 0.4
        ignored[0] = ignored[-1] = False
        target[ignored] = IGNORED
    return batches


@training
def ignored_labels() -> Training:
    return Training(perceptron(), classify, partly_ignored)


@training
def ignored_halves() -> Training:
    """Once no label of the first half of a batch counts, and once a single one of all."""

    def batches() -> list[tuple[Tensor, Tensor]]:
        found = plain_batches()
        found[2][1][:4] = IGNORED
        found[3][1][1:] = IGNORED
        found[4][1][1:] = IGNORED
        return found

    return Training(perceptron(), classify, batches)


@training
def ignored_once() -> Training:
    """A single label of the third batch."""

    def batches() -> list[tuple[Tensor, Tensor]]:
        found = plain_batches()
        found[2][1][0] = IGNORED
        return found

    return Training(perceptron(), classify, batches)


@training
def ignored_labels_adamw() -> Training:
    return Training(perceptron(), classify, partly_ignored, optimizer=adamw)


@training
def ignored_labels_smoothed() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    return Training(perceptron(), loss, partly_ignored)


class Weighted:
    """Cross-entropy with a weight for each class."""

    def __init__(self, **how: Any) -> None:
        self.weights, self.how = torch.tensor([1.0, 1.0, 3.0, 0.25], dtype=torch.float64), how

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=self.weights, **self.how)


def light_first(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Classes of equal weight alone in the first batch."""
    batches[0][1].remainder_(2)
    return batches


@training
def class_weights() -> Training:
    return Training(perceptron(), Weighted(), lambda: light_first(plain_batches()))


@training
def class_weights_ignored() -> Training:
    return Training(perceptron(), Weighted(), lambda: light_first(partly_ignored()))


@training
def class_weights_ignored_smoothed() -> Training:
    return Training(perceptron(), Weighted(label_smoothing=0.1), lambda: light_first(partly_ignored()), LATER)


def padded_text(step: int, samples: int, length: int = 5, classes: int = 4) -> tuple[Tensor, Tensor]:
    """(samples, length) tokens of 1 to 15 and their tags; after the first batch padded with 0 and IGNORED."""
    text, tags = labels(step, samples, length, classes=15) + 1, labels(50 + step, samples, length, classes=classes)
    if step:
        lengths = labels(70 + step, samples, classes=length) + 1
        beyond = torch.arange(length) >= lengths[:, None]
        text[beyond], tags[beyond] = 0, IGNORED
    return text, tags


def padded_batches() -> list[tuple[Tensor, Tensor]]:
    return [padded_text(step, samples) for step, samples in enumerate(SIZES)]


class Tagger(nn.Module):
    """A transformer over a sequence, blind to padding."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, outputs)

    def forward(self, text: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(self.embedding(text), src_key_padding_mask=text == 0))
        return y


def tag(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


@training
def tagging_padded() -> Training:
    return Training(seeded(Tagger), tag, padded_batches)


@training
def tagging_flat() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), label_smoothing=0.1)

    return Training(seeded(model), loss, padded_batches)


@training
def segmentation() -> Training:
    """Every pixel has a class, but those on borders (255)."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
                             nn.Conv2d(4, 3, 1))  # fmt: skip

    def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
        pixels, target = features(step, samples, 2, 4, 4), labels(step, samples, 4, 4, classes=3)
        if step:
            target[chances(step, samples, 4, 4) < 0.3] = 255
            target[0, 1:] = 255
        return pixels, target

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=255)

    return Training(seeded(model), loss, lambda: [batch(step, n) for step, n in enumerate(SIZES)])
