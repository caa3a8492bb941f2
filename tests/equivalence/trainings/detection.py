"""Trainings of detectors: losses over the anchors that match, counted by batch or by image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import RIGHT, SIZES, Training, chances, features, labels, seeded, training


def anchored(step: int, samples: int, anchors: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Features, class of every anchor (0: background), box of every anchor (4 numbers).

    In the first batch every sample has one positive; later some have none, and once nobody has any.
    """
    classes = torch.zeros(samples, anchors, dtype=torch.long)
    if step == 0:
        classes[:, 1] = labels(step, samples, classes=3) + 1
    elif step != 3:
        some = chances(step, samples, anchors) < 0.35
        classes[some] = (labels(step, samples, anchors, classes=3) + 1)[some]
        classes[0] = 1
    return features(step, samples), classes, features(400 + step, samples, anchors, 4)


class Detector(nn.Module):
    """Of every anchor the logits of 4 classes (0: background) and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.classes, self.boxes = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.classes(y).unflatten(1, (3, 4)), self.boxes(y).unflatten(1, (3, 4))


def anchored_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [anchored(step, samples) for step, samples in enumerate(SIZES)]


@training
def detection_focal() -> Training:
    """As RetinaNet: focal loss of all anchors and smooth L1 of the positive ones, both over how many these are."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits, boxes = model(batch[0])
        positive = batch[1] > 0
        normalizer = positive.sum().clamp(min=1)
        target = F.one_hot(batch[1], 4)[..., 1:].double()
        entropy = F.binary_cross_entropy_with_logits(logits[..., 1:], target, reduction="none")
        chance = logits[..., 1:].sigmoid()
        right = chance * target + (1 - chance) * (1 - target)
        focal = (0.25 * target + 0.75 * (1 - target)) * (1 - right) ** 2 * entropy
        place = F.smooth_l1_loss(boxes[positive], batch[2][positive], reduction="sum")
        return focal.sum() / normalizer + place / normalizer

    return Training(seeded(Detector), loss, anchored_batches)


@training
def detection_two_counts() -> Training:
    """Classes over all anchors that are not left out, boxes over the positive ones: two terms, two counts."""

    def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
        found = anchored_batches()
        for step, (_, classes, _) in enumerate(found[1:], 1):
            left = (chances(40 + step, *classes.shape) < 0.3) & (classes == 0)
            classes[left] = -1
        return found

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits, boxes = model(batch[0])
        kind = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=-1)
        positive = (batch[1] > 0).double()
        place = F.smooth_l1_loss(boxes, batch[2], reduction="none").sum(-1)
        return kind + 2.0 * (place * positive).sum() / positive.sum().clamp(min=1)

    return Training(seeded(Detector), loss, batches)


@training
def detection_per_image() -> Training:
    """Over each image's own number of positives, then a mean over images."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits, boxes = model(batch[0])
        positive = (batch[1] > 0).double()
        place = (F.smooth_l1_loss(boxes, batch[2], reduction="none").sum(-1) * positive).sum(1)
        kind = F.cross_entropy(logits.transpose(1, 2), batch[1], reduction="none").mean(1)
        return (kind + place / positive.sum(1).clamp(min=1)).mean()

    return Training(seeded(Detector), loss, anchored_batches, RIGHT)
