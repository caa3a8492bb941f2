"""Trainings that change Python state or buffers as they go: counters, schedules, memories, parts that freeze."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    AT_ONCE,
    BY_SAMPLE,
    IGNORED,
    MICROBATCHES,
    PLANS,
    STATE,
    Training,
    classify,
    perceptron,
    plain_batches,
    seeded,
    training,
)
from tests.equivalence.trainings.uncounted_labels import partly_ignored


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
