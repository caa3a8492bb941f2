"""The proof of asynchronous pipelines: batches of another form find the pipeline empty, in run and replay alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.training import sgd

LENGTHS = (5, 5, 5, 7, 7, 5, 5)


class Words(nn.Module):
    """A small model of texts, whose length is part of its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        logits: Tensor = self.out(x + torch.tanh(self.inner(x.cumsum(1))))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch(length: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (4, length), generator=random), torch.randint(0, 16, (4, length), generator=random)


@pytest.mark.parametrize(
    "plan",
    subsets.one_in(
        2,
        [
            "pipeline=3,schedule=pipedream,vertical_sync=yes",
            "pipeline=3,schedule=pipedream",
            "pipeline=2,schedule=pipedream-2bw,microbatches=2",
        ],
    ),
)
def test_texts_of_two_lengths(plan: str) -> None:
    batches = [batch(length, number) for number, length in enumerate(LENGTHS)]
    verdict = verify(Words(), Objective("loss", loss, sgd), batches, plan)
    assert verdict.passed, verdict.culprit
