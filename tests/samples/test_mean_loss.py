"""Is a loss a mean over samples? Exact models pass; others are refused with the node that makes them so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.recipe import Mean
from polylane.samples.mean_loss import splits_exactly
from tests.support import models
from tests.support.reference.eager_and_captured import captured


def verdict(model: nn.Module, loss: Any, batch: Any) -> str | None:
    return verdict_of(capture(model, loss, batch), model, loss, batch)


def verdict_of(graph: Graph, model: nn.Module, loss: Any, batch: Any) -> str | None:
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    result = splits_exactly(graph, model, loss, flatten(batch)[0])
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    return result


@pytest.mark.parametrize("name", [*models.CASES, *models.TINY])
def test_cases_split_as_they_say(name: str) -> None:
    graph, model, case = captured(name)
    told = verdict_of(graph, model, case.loss, case.batch(4, 1))
    assert (told is None) == case.mean, told


def test_in_batch_negatives_name_the_product() -> None:
    case = models.towers()
    told = verdict(case.model(), case.loss, case.batch(6, 0))
    assert told is not None
    assert told.startswith("the loss is not a mean over samples: matmul in the model (")
    assert "hard_models.py:" in told
    assert "depend on the others" in told


def test_labels_made_first_are_not_to_blame() -> None:
    case = models.towers()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        labels = torch.arange(batch[0].shape[0])
        return F.cross_entropy(model(*batch), labels)

    told = verdict(case.model(), loss, case.batch(6, 0))
    assert told is not None
    assert "matmul" in told


def ignored(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Text of which ever more is ignored."""
    inputs, targets = models.tokens(samples, seed)
    targets = targets.clone()
    for i in range(samples):
        targets[i, : 2 * i] = -100
    return inputs, targets


def test_ignored_tokens_need_a_mean() -> None:
    case = models.encoder()
    told = verdict(case.model(), case.loss, ignored(5, 0))
    assert told is not None
    assert "loss/cross_entropy_loss in the loss" in told
    assert "models.py:" in told
    assert "polylane.Mean(total, count)" in told


def test_ignored_tokens_with_a_mean_are_exact() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        inputs, targets = batch
        total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        return Mean(total, (targets != -100).sum())

    assert verdict(models.encoder().model(), loss, ignored(5, 0)) is None


def test_a_sum_is_no_mean() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    told = verdict(nn.Linear(16, 4), loss, models.vectors(5, 0))
    assert told is not None
    assert "cross_entropy_loss" in told


class Own(nn.Module):
    """A computation of one's own between two layers."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.fc, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.compute(self.fc(x)))
        return logits


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x - x.mean(0), "mean"),
        (lambda x: x / x.abs().max(), "max"),
        (lambda x: x + x.flip(0), "flip"),
        (lambda x: x.softmax(0), "softmax"),
        (lambda x: x[torch.randperm(x.shape[0])], "randperm"),
        (lambda x: x * torch.arange(x.shape[0])[:, None], "mul"),
        (lambda x: x - x.std(), "std"),
    ],
)
def test_samples_that_know_of_each_other(compute: Callable[[Tensor], Tensor], name: str) -> None:
    told = verdict(Own(compute), models.classify, models.vectors(6, 0))
    assert told is not None
    blamed = told.split(": ")[1].split(" in ")[0].split("#")[0]
    # A mean of parts is a mean, and turned samples are samples: what is blamed is what puts them together.
    assert blamed == {"mean": "sub", "flip": "add"}.get(name, name)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x.unflatten(1, (2, 4)).flatten(0, 1), 0.5).unflatten(0, (-1, 2)).flatten(1),
        lambda x: F.dropout(x.unflatten(1, (2, 4)).transpose(0, 1), 0.3).transpose(0, 1).flatten(1),
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.rand(x.shape[0], 1),
        lambda x: x + torch.randn(8),
        lambda x: x.unflatten(1, (2, 4)).transpose(0, 1).flatten(0, 1).tanh().unflatten(0, (2, -1))[0].repeat(1, 2),
        lambda x: x.t().contiguous().exp().t(),
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    ],
)  # fmt: skip
def test_samples_on_their_own(compute: Callable[[Tensor], Tensor]) -> None:
    assert verdict(Own(compute), models.classify, models.vectors(6, 0)) is None


def test_buffers_that_replicas_would_disagree_on() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)
            self.register_buffer("average", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            logits: Tensor = self.fc(x)
            return logits

    told = verdict(Averaging(), models.classify, models.vectors(6, 0))
    assert told is not None
    assert "the buffer average depends on how the samples are divided" in told
    assert "test_mean_loss.py:" in told


def test_a_buffer_of_rounding_depends_on_nothing() -> None:
    """The mean of what is normalized already is zero; what is computed differs with every number of samples."""

    class Twice(nn.Module):
        def __init__(self, shift: float = 0.0) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(512, 16), nn.BatchNorm1d(16)
            self.scale, self.again = nn.Parameter(torch.randn(16)), nn.BatchNorm1d(16)
            self.head, self.shift = nn.Linear(16, 4), shift

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x)) * self.scale
            with torch.no_grad():
                self.again.running_mean += self.shift * len(x)
            logits: Tensor = self.head(self.again(x).relu())
            return logits

    torch.manual_seed(0)
    assert verdict(Twice(), models.classify, models.vectors(6, 0, size=512)) is None
    told = verdict(Twice(1e-12), models.classify, models.vectors(6, 0, size=512))
    assert told is not None and "the buffer again.running_mean depends on how the samples are divided" in told


def test_an_opaque_model_with_dropout_splits() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(16, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.drop(self.fc(x))
            return y if y.abs().sum() >= 0 else x[:, :4]

    assert verdict(Ways(), models.classify, models.vectors(6, 0)) is None


def test_an_opaque_model_with_batch_statistics_splits() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.fc(x))
            return y if y.abs().sum() >= 0 else x[:, :4]

    assert verdict(Ways(), models.classify, models.vectors(6, 0)) is None


def test_an_opaque_model_that_looks_around_does_not() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x - x.mean(0))
            return y if y.abs().sum() >= 0 else x[:, :4]

    told = verdict(Ways(), models.classify, models.vectors(6, 0))
    assert told is not None
    assert told.startswith("the loss is not a mean over samples: leaf in the model")


def test_a_model_that_fails_on_few_samples() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).view(6, -1).mean()

    told = verdict(nn.Linear(16, 5), loss, models.vectors(6, 0))
    assert told is not None
    assert "loss/view fails on a part of the batch" in told
    assert "\n" not in told


def test_meta_models_are_not_tried() -> None:
    model = nn.Linear(16, 4, device="meta")
    graph = capture(model, models.classify, models.vectors(6, 0))
    assert splits_exactly(graph, model, models.classify, flatten(models.vectors(6, 0))[0]) is None
