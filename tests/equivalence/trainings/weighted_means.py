"""Trainings whose loss is a mean over what counts: weights, masks, selections, tokens of several lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.recipe import Mean
from tests.equivalence.trainings.training import (
    AT_ONCE,
    IGNORED,
    MICROBATCHES,
    PLANS,
    SIZES,
    Training,
    adamw,
    chances,
    each,
    features,
    labels,
    perceptron,
    seeded,
    training,
    weighted_batches,
)
from tests.equivalence.trainings.uncounted_labels import Tagger, padded_batches, padded_text, tag


@training
def weighted_mean() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return (each(model, batch) * batch[2]).sum() / batch[2].sum()

    return Training(perceptron(), loss, weighted_batches)


@training
def weights_of_halves() -> Training:
    """Once the first half of a batch weighs nothing, and once all but one sample."""

    def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
        found = weighted_batches()
        found[2][2][:4] = 0
        found[4][2][1:] = 0
        return found

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return (each(model, batch) * batch[2]).sum() / batch[2].sum()

    return Training(perceptron(), loss, batches)


@training
def selected_mean() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return each(model, batch)[batch[2] > 0.5].mean()

    return Training(perceptron(), loss, weighted_batches)


@training
def masked_select() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return torch.masked_select(each(model, batch), batch[2].gt(0.3)).mean()

    return Training(perceptron(), loss, weighted_batches, optimizer=adamw)


@training
def selected_rows() -> Training:
    """The rows that count are selected before the loss, labels and predictions alike."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        valid = batch[2] > 0.3
        return F.cross_entropy(model(batch[0])[valid], batch[1][valid])

    return Training(perceptron(), loss, weighted_batches)


@training
def missing_targets() -> Training:
    """Several targets for each sample, of which some are not known (NaN)."""

    def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
        target = features(300 + step, samples, 4)
        if step:
            target[chances(step, samples, 4) < 0.5] = math.nan
            target[0] = 0.5
        return features(step, samples), target

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        known = ~batch[1].isnan()
        errors = (model(batch[0]) - batch[1].nan_to_num()).square()
        return torch.where(known, errors, 0.0).sum() / known.sum()

    return Training(perceptron(), loss, lambda: [batch(step, n) for step, n in enumerate(SIZES)])


@training
def binary_masked() -> Training:
    """Several yes-or-no labels, the positive ones heavier, not all of them known."""

    def batch(step: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.ones(samples, 4, dtype=torch.float64) if step == 0 else (chances(step, samples, 4) < 0.6).double()
        mask[0] = 1
        return features(step, samples), labels(step, samples, 4, classes=2).double(), mask

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        heavier = torch.full((4,), 3.0, dtype=torch.float64)
        losses = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], pos_weight=heavier, reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()

    return Training(perceptron(), loss, lambda: [batch(step, n) for step, n in enumerate(SIZES)])


@training
def explicit_mean() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Mean:
        return Mean((each(model, batch) * batch[2]).sum(), batch[2].sum())

    return Training(perceptron(), loss, weighted_batches)


@training
def counted_by_loader() -> Training:
    """How much counts comes with the batch, as a number of Python's."""

    def batches() -> list[tuple[Tensor, Tensor, Tensor, float]]:
        return [(*batch, batch[2].sum().item()) for batch in weighted_batches()]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (each(model, batch) * batch[2]).sum() / batch[3]

    return Training(perceptron(), loss, batches, AT_ONCE)


@training
def auxiliary_losses() -> Training:
    """A mean over samples, a mean over counts, and the weights' own size."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        counted = (logits.square().mean(1) * batch[2]).sum() / batch[2].sum()
        size = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(logits, batch[1]) + 0.3 * counted + 1e-2 * size

    return Training(perceptron(), loss, weighted_batches)


@training
def smoothed_over_tokens() -> Training:
    """Kullback-Leibler against smoothed labels, over the number of tokens that are no padding."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        text, tags = batch
        valid = tags != IGNORED
        smooth = torch.full((*tags.shape, 4), 0.1 / 3, dtype=torch.float64)
        smooth = smooth.scatter(-1, tags.clamp(min=0)[..., None], 0.9) * valid[..., None]
        return F.kl_div(model(text).log_softmax(-1), smooth, reduction="sum") / valid.sum()

    return Training(seeded(Tagger), loss, padded_batches)


@training
def tagging_other_lengths() -> Training:
    """Each batch is as long as its longest sequence: later ones have another form than the first."""

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [padded_text(step, samples, (5, 4, 7, 5, 4)[step]) for step, samples in enumerate(SIZES)]

    return Training(seeded(Tagger), tag, batches)


@training
def mask_appears() -> Training:
    """Batches have a mask only where one is needed."""

    def batches() -> list[dict[str, Tensor]]:
        found = [dict(zip(("inputs", "labels", "mask"), batch, strict=True)) for batch in weighted_batches()]
        del found[0]["mask"], found[4]["mask"]
        return found

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="none")
        return (losses * batch["mask"]).sum() / batch["mask"].sum() if "mask" in batch else losses.mean()

    return Training(perceptron(), loss, batches, refusable=PLANS)


@training
def mean_of_times() -> Training:
    """At every time the mean over those that are still there, then the mean over times: a count for each time."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        there = (batch[1] != IGNORED).double()
        return (losses.sum(0) / there.sum(0).clamp(min=1)).mean()

    return Training(seeded(Tagger), loss, padded_batches, refusable=MICROBATCHES)


@training
def over_the_longest() -> Training:
    """Divided by the longest length of the batch, which all have at first."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        lengths = (batch[1] != IGNORED).sum(1)
        return losses.sum() / (lengths.max() * len(lengths))

    return Training(seeded(Tagger), loss, padded_batches, refusable=MICROBATCHES)


@training
def gathered_masked_tokens() -> Training:
    """Predictions at the places of masked tokens alone, found by nonzero."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        places = (batch[1].flatten() != IGNORED).nonzero().squeeze(1)
        return F.cross_entropy(model(batch[0]).flatten(0, 1)[places], batch[1].flatten()[places])

    return Training(seeded(Tagger), loss, padded_batches)
