"""Batches of other sizes than the first are steps of the same tape: a few captures serve them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.prepared_model import PreparedModel
from tests.script.loops import Prepare

LENGTHS = (7, 5, 7, 4, 6, 3, 8, 5)


class PaddedWords(nn.Module):
    """Scores of words, from the words around each and the mean of all that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.around, self.scores = nn.Embedding(9, 6), nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 9)

    def forward(self, words: Tensor) -> Tensor:
        features = self.words(words)
        mask = (words != 0)[..., None].to(features.dtype)
        mean = (features * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return self.scores(self.around(features.transpose(1, 2)).transpose(1, 2) + mean)


def train(prepare: Prepare, model: nn.Module, batches: Sequence[Any], measure: Callable[..., Tensor]) -> Any:
    """Return the printed numbers, and the number of captures of a prepared loop."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    prepared, optimizer = prepare(model, optimizer)
    numbers = list[float]()
    for batch in batches:
        optimizer.zero_grad()
        loss, correct = measure(prepared, *batch)
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), float(correct)]
    captures = len(prepared._polylane_loop.runner.role._cache) if isinstance(prepared, PreparedModel) else 0
    return numbers, captures


def measure_words(model: nn.Module, words: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(words[:, :-1])
    loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), words[:, 1:].reshape(-1), ignore_index=0)
    return loss, (scores.argmax(-1) == words[:, 1:]).sum()


def train_on_lengths(prepare: Prepare) -> Any:
    """Words padded to the longest of each batch."""
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(1)
    batches = [(torch.randint(1, 9, (4, length + 1), generator=drawn),) for length in LENGTHS]
    for (words,) in batches:
        words[0, -2:] = 0
    return train(prepare, PaddedWords().double(), batches, measure_words)


def train_on_a_short_last_batch(prepare: Prepare) -> Any:
    """Two epochs of batches of which the last is shorter, with a number in the loss that depends on its length."""
    torch.manual_seed(0)
    x, y = torch.randn(22, 5).double(), torch.randint(0, 3, (22,))

    def measure(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(x)
        return F.cross_entropy(scores, y, reduction="sum") / len(x), (scores.argmax(1) == y).sum()

    batches = [batch for _ in range(2) for batch in zip(x.split(8), y.split(8), strict=True)]
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return train(prepare, model, batches, measure)


def train_on_what_a_mask_leaves(prepare: Prepare) -> Any:
    """As many rows enter the loss as the script's own mask leaves."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 5).double(), torch.randn(40, 3).double()
    masks = (torch.rand(40, generator=torch.Generator().manual_seed(2)) < 0.6).split(8)

    def measure(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(x)[mask]
        return F.mse_loss(scores, y[mask]), scores.detach().sum()

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return train(prepare, model, [*zip(x.split(8), y.split(8), masks, strict=True)], measure)


def train_on_hard_examples(prepare: Prepare) -> Any:
    """The samples whose losses are above a bound, of which there are as many as the model says, and all samples."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 5).double(), torch.randint(0, 3, (40,))

    def measure(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(model(x), y, reduction="none")
        hard = losses[losses > 1.1]
        return 0.1 * losses.mean() + hard.sum() / len(hard), hard.detach().sum()

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return train(prepare, model, [*zip(x.split(8), y.split(8), strict=True)], measure)


@pytest.mark.parametrize(
    ("loop", "plan", "captures"),
    [
        (train_on_lengths, "data=2", 2),
        pytest.param(train_on_lengths, "pipeline=2,microbatches=2", 2, marks=pytest.mark.slow),
        pytest.param(train_on_lengths, "data=1", 2, marks=pytest.mark.slow),
        (train_on_a_short_last_batch, "pipeline=2", 2),
        pytest.param(train_on_a_short_last_batch, "data=2", 2, marks=pytest.mark.slow),
        pytest.param(train_on_what_a_mask_leaves, "tensor=2", 4, marks=pytest.mark.slow),
        pytest.param(train_on_what_a_mask_leaves, "data=2", 4, marks=pytest.mark.slow),
        (train_on_hard_examples, "data=2", 5),
        pytest.param(train_on_hard_examples, "pipeline=2", 5, marks=pytest.mark.slow),
    ],
)
def test_batches_of_other_sizes_have_the_tape_of_the_first(loop: Callable[..., Any], plan: str, captures: int) -> None:
    expected, _ = loop(lambda *objects: objects)

    def run(context: WorkerContext) -> Any:
        return loop(partial(polylane.prepare, plan=plan))

    for numbers, count in fork_workers(run, 2 if "2" in plan else 1):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11)
        assert count <= captures
