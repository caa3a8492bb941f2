"""Trainings whose loss is a mean over samples that does not look like one, or a sum over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.equivalence.trainings.training import (
    AT_ONCE,
    DIVIDED,
    IGNORED,
    MICROBATCHES,
    RIGHT,
    SIZES,
    Training,
    adamw,
    classify,
    each,
    features,
    labels,
    perceptron,
    plain_batches,
    seeded,
    training,
)
from tests.equivalence.trainings.uncounted_labels import Tagger, padded_batches, padded_text, partly_ignored


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
