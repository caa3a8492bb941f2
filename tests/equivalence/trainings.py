"""Trainings whose loss is not what its first batch shows: the table for ``same_numbers``.

A training here is a small model, a loss as people write it, and a few whole batches of odd sizes. Most are innocent at
first: on their first batch the loss is a mean over samples, every row counts, no branch is taken. What changes later is
what a look at one example batch cannot see. Each says what dividing its batches naively (parts trained alone, their
losses averaged over samples) makes of it, and on which plans it must be equal to one device; on the others it may be
refused. It must never be different.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polylane.recipe import Mean

# In an order in which neighbours are of different kinds: the covering selection takes two neighbours for each training.
PLANS = (
    "data=2",
    "pipeline=2,microbatches=3",
    "data=3",
    "data=2,pipeline=2,microbatches=2",
    "data=2,shard=parameters",
    "tensor=2",
)
ALONE = "data=1"
MICROBATCHES = tuple(plan for plan in PLANS if "microbatches" in plan)
DIVIDED = tuple(plan for plan in PLANS if plan != "tensor=2")  # those that divide a batch

# What averaging over parts makes of a training:
RIGHT = "right"  # the same numbers, on every batch
LATER = "wrong later"  # the same on the first batch, other numbers after
AT_ONCE = "wrong at once"  # other numbers on the first batch
STATE = "state"  # the division is not the point: Python state, random numbers, attributes that change

BY_SAMPLE, BY_PASS = "by sample", "by pass"

SIZES = (7, 9, 8, 7, 3)
IGNORED = -100


@dataclass(frozen=True)
class Training:
    """A model, a loss and the batches of its steps.

    Attributes:
        model: freshly initialised, the same weights every time, in float64.
        loss: (model, batch) to a scalar or a Mean; one that has state is copied for each run.
        batches: whole ones, in float64, one a step; the first is the example.
        naive: what averaging over parts makes of it.
        refusable: plans on which it may be refused; on all others it must be equal.
        optimizer: plain SGD unless said: noise is not amplified.
        before: (model, step), what the user's script does to the model before a step.
        promoted: casts to lower types inside keep float64, on both sides.
        draws: it draws random numbers, which workers draw by key, so that it is held against one worker and not against
            a loop: BY_SAMPLE, whatever the microbatches; or BY_PASS, by the user's own Python, once for each of them.
        in_turn: its forward pass moves state of its own (batch statistics, a counter): held against a loop over the
            plan's microbatches, which are what passes forward there.
        counted: how much a batch counts in such a loop; default: its samples.
        isolated: it writes into the Python around it: every run of it has a process of its own.
        data: the samples, as a recipe's data("train"): trained by ``train``, in place of batches.
        collate, epochs, scheduler: of such a training.
        script: the user's whole script, called with a function that has the place of ``polylane.parallelize``; returns
            losses and weights.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor | Mean]
    batches: Callable[[], Sequence[Any]]
    naive: str = LATER
    refusable: tuple[str, ...] = ()
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None
    before: Callable[[Any, int], None] | None = None
    promoted: bool = False
    draws: str = ""
    in_turn: bool = False
    counted: Callable[[Any], float] | None = None
    isolated: bool = False
    data: Callable[[], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    epochs: int = 2
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    script: Callable[[Callable[..., Any]], tuple[list[float], Any]] | None = None

    @property
    def is_launched(self) -> bool:
        """Whether a command or a script trains it, and not a job in a test's hands."""
        return self.data is not None or self.script is not None

    @property
    def optimizer_or_sgd(self) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
        return self.optimizer or sgd


TRAININGS: dict[str, Callable[[], Training]] = {}


def training(make: Callable[[], Training]) -> Callable[[], Training]:
    """Enter a training into the table under its function's name."""
    TRAININGS[make.__name__] = make
    return make


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.2)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, weight_decay=0.1)


# Models and data ------------------------------------------------------------------------------------------------------


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights every time, in float64."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return model


def perceptron(outputs: int = 4) -> Callable[[], nn.Module]:
    """Three layers from 6 features."""
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)))


def numbers(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def features(step: int, samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *(shape or (6,)), generator=numbers(step), dtype=torch.float64)


def labels(step: int, *shape: int, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, shape, generator=numbers(1000 + step))


def chances(step: int, *shape: int) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(*shape, generator=numbers(2000 + step), dtype=torch.float64)


def classified(step: int, samples: int) -> tuple[Tensor, Tensor]:
    return features(step, samples), labels(step, samples)


def plain_batches() -> list[tuple[Tensor, Tensor]]:
    return [classified(step, samples) for step, samples in enumerate(SIZES)]


def with_weights(step: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples with weights: all of them 1 at first and at last; between, some are 0, and one has the most."""
    weights = chances(step, samples).round(decimals=2)
    weights[0], weights[-1] = 1.5, 0.0
    return *classified(step, samples), torch.ones_like(weights) if step in (0, 4) else weights


def weighted_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [with_weights(step, samples) for step, samples in enumerate(SIZES)]


def each(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss of every sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def classify(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Labels that do not count ---------------------------------------------------------------------------------------------


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


# Means over what counts -----------------------------------------------------------------------------------------------


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


# Detection ------------------------------------------------------------------------------------------------------------


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


# Means over samples that look otherwise -------------------------------------------------------------------------------


@training
def sum_over_samples() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return each(model, batch).sum() / batch[0].shape[0]

    return Training(perceptron(), loss, plain_batches, RIGHT)


@training
def weights_in_loss() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return classify(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return Training(perceptron(), loss, plain_batches, RIGHT)


@training
def dice_of_samples() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        chance, target = model(batch[0]).sigmoid(), F.one_hot(batch[1], 4).double()
        return (1 - (2 * (chance * target).sum(1) + 1) / (chance.sum(1) + target.sum(1) + 1)).mean()

    return Training(perceptron(), loss, plain_batches, RIGHT)


@training
def focal_mean() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    return Training(perceptron(), loss, plain_batches, RIGHT, optimizer=adamw)


@training
def ctc() -> Training:
    """Targets of unequal lengths, each divided by its own."""

    def batch(step: int, samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lengths = torch.full((samples,), 2) if step == 0 else labels(step, samples, classes=3) + 1
        return features(step, samples, 8, 6), labels(step, samples, 3) + 1, torch.full((samples,), 8), lengths

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.ctc_loss(model(batch[0]).log_softmax(-1).transpose(0, 1), batch[1], batch[2], batch[3])

    return Training(perceptron(5), loss, lambda: [batch(step, n) for step, n in enumerate(SIZES)], RIGHT, DIVIDED)


class Student(nn.Module):
    """A student and its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


@training
def distillation() -> Training:
    """The teacher's distribution at a temperature, beside labels that are not all known."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        own, taught = model(batch[0])
        soft = F.kl_div((own / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(own, batch[1])

    return Training(seeded(Student), loss, partly_ignored)


@training
def mean_of_means() -> Training:
    """A mean over each sample's own tokens, then over samples."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        there = (batch[1] != IGNORED).double()
        return ((losses * there).sum(1) / there.sum(1)).mean()

    return Training(seeded(Tagger), loss, padded_batches, RIGHT)


class Packed(nn.Module):
    """An LSTM over packed sequences of unequal lengths; the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(16, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=text.shape[1])
        y: Tensor = self.out(states[torch.arange(len(lengths)), lengths - 1])
        return y


@training
def packed_sequences() -> Training:
    def batch(step: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        text, _ = padded_text(step, samples)
        return text, (text != 0).sum(1), labels(step, samples)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    def batches() -> list[Any]:
        return [batch(step, samples) for step, samples in enumerate(SIZES)]

    return Training(seeded(Packed), loss, batches, RIGHT)


@training
def sum_undivided() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return 0.1 * each(model, batch).sum()

    return Training(perceptron(), loss, plain_batches, AT_ONCE, refusable=MICROBATCHES)


# Losses in which samples meet -----------------------------------------------------------------------------------------


def meeting(loss: Callable[[Any, Any], Tensor]) -> Training:
    """A perceptron under a loss in which samples meet: replicas split its operators; there are no microbatches."""
    return Training(perceptron(), loss, plain_batches, AT_ONCE, refusable=MICROBATCHES)


@training
def hard_half() -> Training:
    return meeting(lambda model, batch: each(model, batch).topk(len(batch[0]) // 2).values.mean())


@training
def hard_sorted() -> Training:
    return meeting(lambda model, batch: each(model, batch).sort(descending=True).values[: len(batch[0]) // 2].mean())


@training
def hard_above_mean() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        return losses[losses >= losses.detach().mean()].mean()

    return meeting(loss)


@training
def hard_above_threshold() -> Training:
    """At first all are harder than that; the model learns."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        return losses[losses > 1.3].mean()

    def batches() -> list[tuple[Tensor, Tensor]]:
        found = plain_batches()
        logits = perceptron()()(found[0][0])
        return [(found[0][0], logits.argmin(1)), *found[1:]]

    return Training(perceptron(), loss, batches, refusable=DIVIDED)


@training
def median() -> Training:
    return meeting(lambda model, batch: each(model, batch).median())


@training
def largest() -> Training:
    return meeting(lambda model, batch: each(model, batch).max())


@training
def robust() -> Training:
    """Weighs samples by a softmax over the batch's losses."""
    return meeting(lambda model, batch: torch.logsumexp(each(model, batch), 0) - math.log(len(batch[0])))


@training
def detached_weights() -> Training:
    """Each sample weighs what the model's own doubt says, normalized over the batch."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        doubt = (1 - (-losses).exp()).detach()
        return (losses * doubt / doubt.sum()).sum()

    return meeting(loss)


@training
def balanced_classes() -> Training:
    """Weights of classes by how often they are in this batch."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        counts = torch.bincount(batch[1], minlength=4).double()
        return F.cross_entropy(model(batch[0]), batch[1], weight=counts.sum() / (4 * counts.clamp(min=1)))

    return meeting(loss)


@training
def dice_of_batch() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        chance, target = model(batch[0]).sigmoid(), F.one_hot(batch[1], 4).double()
        return (1 - (2 * (chance * target).sum(0) + 1) / (chance.sum(0) + target.sum(0) + 1)).mean()

    return meeting(loss)


@training
def in_batch_negatives() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        states = F.normalize(model(batch[0]), dim=-1)
        return F.cross_entropy(5 * states @ states.t(), torch.arange(len(states)))

    return meeting(loss)


@training
def hardest_triplets() -> Training:
    """Of every anchor the furthest of its class and the nearest of another."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        states = model(batch[0])
        far = (states[:, None] - states[None]).square().sum(-1)
        same = batch[1][:, None] == batch[1][None]
        furthest = torch.where(same, far, 0.0).amax(1)
        nearest = torch.where(same, 1e3, far).amin(1)
        return F.relu(furthest - nearest + 1.0).mean()

    return meeting(loss)


@training
def ranked_pairs() -> Training:
    """A margin between all pairs of which one should come first."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        score = model(batch[0]).sum(1)
        first = (batch[1][:, None] > batch[1][None]).double()
        losses = F.softplus(score[None] - score[:, None])
        return (losses * first).sum() / first.sum().clamp(min=1)

    return meeting(loss)


@training
def spread_of_states() -> Training:
    """As VICReg: the batch's standard deviation and covariance in the loss."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        states = model(batch[0])
        deviation = (states.var(0) + 1e-4).sqrt()
        centred = states - states.mean(0)
        covariance = centred.t() @ centred / (len(states) - 1)
        off = covariance - covariance.diag().diag()
        return classify(model, batch) + F.relu(1 - deviation).mean() + 0.1 * off.square().sum()

    return meeting(loss)


@training
def mixed_up() -> Training:
    """Samples mixed with others in a random order."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        order = torch.randperm(len(batch[0]))
        logits = model(0.7 * batch[0] + 0.3 * batch[0][order])
        return 0.7 * F.cross_entropy(logits, batch[1]) + 0.3 * F.cross_entropy(logits, batch[1][order])

    return Training(perceptron(), loss, plain_batches, STATE, refusable=DIVIDED, draws=BY_SAMPLE)


class Rescaled(torch.autograd.Function):
    """What comes, with a gradient that is scaled by its largest value over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.abs().max()


class Rescales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Rescaled.apply(x)
        return y


@training
def function_of_batch() -> Training:
    """An autograd function whose value shows nothing and whose gradient depends on all samples."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Rescales(), nn.Linear(8, 4))

    return Training(seeded(model), classify, plain_batches, AT_ONCE, refusable=DIVIDED)


class Centred(torch.autograd.Function):
    """Large values lose the batch's mean; ordinary ones pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.large = bool(x.abs().max() > 2.5)
        return x - x.mean(0) if ctx.large else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0) if ctx.large else gradient


class Centres(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Centred.apply(x)
        return y


def growing_batches() -> list[tuple[Tensor, Tensor]]:
    """Samples of one size in the first batch; larger ones in later batches, the first of them above all."""
    batches = plain_batches()
    batches[0][0].clamp_(-1, 1)
    for inputs, _ in batches[1:]:
        inputs.mul_(1.1)[0] *= 3
    return batches


@training
def function_that_sees_batch() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Centres(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, growing_batches, refusable=DIVIDED)


# Branches on the batch ------------------------------------------------------------------------------------------------


def once_large() -> list[tuple[Tensor, Tensor]]:
    """As the above, but for a single batch, the third: before and after it nothing is to be seen."""
    batches, ordinary = growing_batches(), plain_batches()
    for step in (1, 3, 4):
        batches[step] = ordinary[step][0].clamp(-1, 1), ordinary[step][1]
    return batches


class Branching(nn.Module):
    """Looks at all of the batch, and doubles what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if x.abs().mean() > 1.2:
            y = y * 2
        return y


@training
def branch_on_batch() -> Training:
    return Training(seeded(Branching), classify, growing_batches)


@training
def branch_taken_once() -> Training:
    return Training(seeded(Branching), classify, once_large)


class Dormant(nn.Module):
    """A part that does nothing until something large comes, and then looks at its whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if (x.abs() > 2.5).any().item():
            x = x - x.mean(0) + 0.1 * self.scale(x)
        return x


@training
def dormant_leaf() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Dormant(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, growing_batches, refusable=DIVIDED)


@training
def dormant_leaf_once() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Dormant(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, once_large, refusable=DIVIDED)


@training
def branching_loss() -> Training:
    """The loss itself looks at what the batch holds."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        losses = each(model, batch)
        if bool((batch[1] == 3).any()):
            losses = losses * torch.where(batch[1] == 3, 2.0, 0.5)
        return losses.mean()

    def batches() -> list[tuple[Tensor, Tensor]]:
        found = plain_batches()
        found[0][1].remainder_(3)
        for _, target in found[1:]:
            target.remainder_(3)[-1] = 3
        return found

    return Training(perceptron(), loss, batches)


# State ----------------------------------------------------------------------------------------------------------------


class Centre(nn.Module):
    """A centre that moves with the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.centre
        self.centre.mul_(0.8).add_(0.2 * x.detach().mean(0))
        return y


@training
def moving_centre() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Centre(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, plain_batches, STATE, refusable=MICROBATCHES, in_turn=True)


class Counter(nn.Module):
    """Counts in a buffer, and changes its mind after a few passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.add_(1)
        return torch.where(self.passes > 2, 2 * x, x)


@training
def counter_in_buffer() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), Counter(), nn.Tanh(), nn.Linear(8, 4))

    return Training(seeded(model), classify, plain_batches, STATE)


@training
def batch_norm_ignored() -> Training:
    """Batch statistics in the model, a mean over counts as the loss."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def counted(batch: Sequence[Tensor]) -> float:
        return float((batch[1] != IGNORED).sum())

    return Training(seeded(model), classify, partly_ignored, AT_ONCE, in_turn=True, counted=counted)


class Calls(nn.Module):
    """Counts its calls in an attribute and doubles its output after some."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls > 2 else x


@training
def counted_calls() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Calls(), nn.Linear(8, 4))

    return Training(seeded(model), classify, plain_batches, STATE, refusable=PLANS, in_turn=True)


class Annealed:
    """A loss that anneals one of its terms by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        self.calls += 1
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + min(1.0, 0.1 * self.calls) * logits.square().mean()


@training
def annealed_loss() -> Training:
    return Training(perceptron(), Annealed(), plain_batches, STATE, refusable=PLANS, in_turn=True)


class Remembers(nn.Module):
    """Keeps the states of the last pass in a list, and pulls towards their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x + 0.5 * self.seen[-1] if self.seen else x
        self.seen.append(x.detach().mean(0))
        return y


@training
def remembered_states() -> Training:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Remembers(), nn.Linear(8, 4))

    return Training(seeded(model), classify, plain_batches, STATE, refusable=PLANS, in_turn=True)


class Tempered(nn.Module):
    """Divides its logits by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) / self.temperature
        return y


@training
def tempered() -> Training:
    """The user's script lowers an attribute step by step."""

    def before(model: Any, step: int) -> None:
        model.temperature = 1.0 / (1 + step)

    return Training(seeded(Tempered), classify, plain_batches, STATE, refusable=PLANS, before=before)


SETTINGS = {"penalty": 0.0}


@training
def penalty_in_a_global() -> Training:
    """The script raises a factor of the loss, which is in a dictionary of its module."""

    def before(model: Any, step: int) -> None:
        SETTINGS["penalty"] = 0.2 * step

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + SETTINGS["penalty"] * logits.square().mean()

    return Training(perceptron(), loss, plain_batches, STATE, refusable=PLANS, before=before)


@training
def unfrozen() -> Training:
    """A part is trained from the third step on only."""

    def before(model: Any, step: int) -> None:
        model[0].requires_grad_(step >= 2)

    return Training(perceptron(), classify, plain_batches, STATE, refusable=PLANS, before=before)


@training
def part_in_evaluation() -> Training:
    """The script puts a part into evaluation mode after some steps, so that its statistics stand still."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def before(model: Any, step: int) -> None:
        model[1].train(step < 2)

    return Training(seeded(model), classify, plain_batches, STATE, PLANS, before=before, in_turn=True)


@training
def dropout_switched_on() -> Training:
    """Dropout begins after two steps."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 4))

    def before(model: Any, step: int) -> None:
        model[2].p = 0.0 if step < 2 else 0.4

    return Training(seeded(model), classify, plain_batches, STATE, PLANS, before=before, draws=BY_SAMPLE)


# Random numbers -------------------------------------------------------------------------------------------------------


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


# Hugging Face ---------------------------------------------------------------------------------------------------------


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, use_cache=False))


def bert(kind: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 8, "type_vocab_size": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = getattr(transformers, kind)(transformers.BertConfig(**sizes, **heads, **still, **more))
    return model


def causal_batches() -> list[dict[str, Tensor]]:
    """Whole sequences at first; then the labels of a prompt of unequal length, and of padding, do not count."""
    batches = []
    for step, samples in enumerate(SIZES):
        text = labels(step, samples, 6, classes=16)
        target, mask = text.clone(), torch.ones_like(text)
        if step:
            target[torch.arange(6) < labels(20 + step, samples, classes=5)[:, None]] = IGNORED
            target[0, 5:], mask[0, 5:] = IGNORED, 0
        batches.append({"input_ids": text, "attention_mask": mask, "labels": target})
    return batches


@training
def hf_causal() -> Training:
    return Training(seeded(llama), own_loss, causal_batches, promoted=True)


@training
def hf_items_in_batch() -> Training:
    """How many labels count is counted by the loader, as Hugging Face's Trainer does."""

    def batches() -> list[dict[str, Tensor]]:
        found = causal_batches()
        return [{**each, "num_items_in_batch": (each["labels"][:, 1:] != IGNORED).sum()} for each in found]

    return Training(seeded(llama), own_loss, batches, AT_ONCE, promoted=True)


@training
def hf_masked() -> Training:
    """One masked token in each sequence at first; then as many as chance has it."""

    def batches() -> list[dict[str, Tensor]]:
        found = []
        for step, samples in enumerate(SIZES):
            text = labels(step, samples, 6, classes=15) + 1
            hidden = chances(step, samples, 6) < 0.35
            hidden[0, 2:4] = True
            if step == 0:
                hidden = (torch.arange(6) == 2).expand(samples, 6)
            target = torch.where(hidden, text, IGNORED)
            found.append({"input_ids": text.masked_fill(hidden, 0), "labels": target})
        return found

    return Training(seeded(lambda: bert("BertForMaskedLM")), own_loss, batches, promoted=True)


@training
def hf_tokens() -> Training:
    def batches() -> list[dict[str, Tensor]]:
        found = []
        for text, tags in padded_batches():
            found.append({"input_ids": text, "attention_mask": (text != 0).long(), "labels": tags})
        return found

    def model() -> nn.Module:
        return bert("BertForTokenClassification", num_labels=4, classifier_dropout=0.0)

    return Training(seeded(model), own_loss, batches, promoted=True)


# Gradients of another kind --------------------------------------------------------------------------------------------


@training
def gradient_penalty() -> Training:
    """A second derivative, of each sample by itself."""

    def penalized(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        inputs = batch[0].clone().requires_grad_(True)
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + (slope.norm(dim=1) - 1).square().mean()

    return Training(perceptron(), penalized, plain_batches, RIGHT)


@training
def looked_up_rows() -> Training:
    """Sparse gradients of an embedding, of rows that are other ones in every batch."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(40, 6, sparse=True, padding_idx=0), nn.Linear(6, 4)

        def forward(self, text: Tensor) -> Tensor:
            mixed: Tensor = self.out(torch.tanh(self.words(text).mean(1)))
            return mixed

    def batches() -> list[tuple[Tensor, Tensor]]:
        return [(labels(step, n, 3, classes=5 + 7 * step), labels(step, n)) for step, n in enumerate(SIZES)]

    def adagrad(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(list(parameters), lr=0.1)

    return Training(seeded(Words), classify, batches, RIGHT, refusable=("data=2,shard=parameters",), optimizer=adagrad)
