"""Trainings whose loss couples the samples of a batch: sorting, ranking, contrasting, statistics of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    AT_ONCE,
    BY_SAMPLE,
    DIVIDED,
    MICROBATCHES,
    STATE,
    Training,
    classify,
    each,
    perceptron,
    plain_batches,
    seeded,
    training,
)


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
def barlow_twins() -> Training:
    """The cross-correlation of two views over the whole batch (Zbontar et al., 2021)."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        views = (model(batch[0]), model(batch[0] + 0.1))
        first, second = ((states - states.mean(0)) / states.std(0) for states in views)
        correlation = first.t() @ second / len(first)
        wanted = torch.eye(len(correlation), dtype=correlation.dtype)
        return ((correlation - wanted).square() * (0.1 + 0.9 * wanted)).sum()

    return meeting(loss)


class BalancedExperts(nn.Module):
    """A router, four linear experts of which each sample takes one, and how uneven the batch's choices are."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(4, 6, 4) / 6**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        taken = F.one_hot(chances.argmax(-1), 4).to(x.dtype)
        output = torch.einsum("nd,edf,ne->nf", x, self.experts, taken * chances)
        # Share of samples times mean chance, by expert (Switch Transformers, section 2.2): a product of two means over
        # the batch, which parts of the batch do not add up to.
        return output, 4 * (taken.mean(0) * chances.mean(0)).sum()


@training
def balance_of_experts() -> Training:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        logits, imbalance = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * imbalance

    return Training(seeded(BalancedExperts), loss, plain_batches, AT_ONCE, refusable=MICROBATCHES)


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
