"""Tokens are the whole numbers that an embedding looks up, wherever they are in the batch, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.nodes.token_leaves import count_tokens, find_token_leaves
from tests.support import models


class Words(nn.Module):
    """A mean of words' rows, of those that a mask has; by ``shape`` they are cut, shifted or masked before."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Tensor], is_table: bool = False) -> None:
        super().__init__()
        self.shape, self.is_table = shape, is_table
        self.rows = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        numbers = self.shape(words, mask)
        rows = self.rows.weight[numbers] if self.is_table else self.rows(numbers)
        return self.head(rows.mean(dim=1) * mask.float().mean(dim=1, keepdim=True))


def loss(model: nn.Module, batch: Any) -> Tensor:
    mask, words, labels = batch
    return F.cross_entropy(model(words, mask), labels[:, 0])


def batch_of(samples: int) -> Any:
    """The mask and the labels have as many whole numbers as the words, or more."""
    return torch.ones(samples, 9, dtype=torch.int64), torch.randint(0, 8, (samples, 7)), torch.zeros(samples, 9).long()


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        lambda words, mask: words,
        lambda words, mask: words[:, :-1].reshape(-1, 2, 3).flatten(1),
        lambda words, mask: words.to(torch.int32).clamp(0, 8) + 1,
        lambda words, mask: words.masked_fill(mask[:, :7] == 0, 0),
        lambda words, mask: F.pad(words, (1, 0))[:, :7],
    ],
    ids=["as they are", "cut", "shifted", "masked", "padded"],
)
def test_words_are_found_and_masks_are_not(shape: Callable[[Tensor, Tensor], Tensor], is_table: bool) -> None:
    graph = capture(Words(shape, is_table), loss, batch_of(4))
    assert find_token_leaves(graph.code.fx) == {1}
    assert count_tokens(list(batch_of(4)), {1}, samples=12) == 84


def test_numbers_of_places_are_no_tokens() -> None:
    """They are counted from a mask, and not what it has."""
    graph = capture(Words(lambda words, mask: mask.cumsum(1) - 1), loss, batch_of(4))
    assert find_token_leaves(graph.code.fx) == frozenset()


def test_a_map_of_classes_has_none() -> None:
    model = nn.Conv2d(3, 5, 1)
    batch = torch.rand(4, 3, 6, 6), torch.randint(0, 5, (4, 6, 6))
    graph = capture(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    assert find_token_leaves(graph.code.fx) == frozenset()


def test_a_gpt_has_its_text() -> None:
    case = models.example_case("gpt")
    graph = capture(case.model(), case.loss, case.batch(4, 0))
    assert find_token_leaves(graph.code.fx) == {0}


def test_tokens_are_several_to_a_sample() -> None:
    words = torch.zeros(4, 7, dtype=torch.int64)
    assert count_tokens([words, words[:, 1:]], {0, 1}, samples=12) == 84
    assert count_tokens([words[:, 0], "text", words[:0], None], {0, 1, 2, 3, 4}, samples=12) == 0
