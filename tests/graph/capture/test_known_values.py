"""What export cannot see and a model may do all the same: ask about constants, keep weights in a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.batch import batch_structure, flatten
from polylane.graph.capture.capture import capture


class AsksAboutConstants(nn.Module):
    """Branches on a mask that it writes down itself, and on a table that it keeps as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.columns = nn.Linear(4, 4), torch.tensor([True, False, True, False])

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask[1:] = torch.ones(3).cumsum(0)
        if mask.max() > 2 and torch.equal(mask[:2], torch.tensor([0.0, 1.0])):
            x = self.linear(x)
        return torch.stack([x[:, i] * 2 if doubled else x[:, i] for i, doubled in enumerate(self.columns)], 1)


class RandomBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if torch.rand(()) < 0.5 else 2 * self.linear(x)
        return y


class WeightsInAList(nn.Module):
    """Sums the squares of weights that it keeps in a list of tuples, as regularization does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.regularized = [(list(self.linear.parameters()), 0.1)]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + sum(rate * w.square().sum() for weights, rate in self.regularized for w in weights)


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("make", [AsksAboutConstants, WeightsInAList])
def test_captured_whole(make: Any) -> None:
    """The capture's own check compares losses and gradients with the model's; without a note it holds."""
    graph = capture(make(), mean, torch.randn(5, 4))
    assert not graph.is_opaque and not graph.notes


def test_what_is_drawn_is_a_question_to_each_step() -> None:
    graph = capture(RandomBranch(), mean, torch.randn(5, 4))
    assert not graph.is_opaque and [reading.is_drawn for reading in graph.code.readings] == [True]


class Record:
    """A batch as graph packages have it: named items beside hidden fields."""

    def __init__(self, graphs: int, **items: Any) -> None:
        self._items, self._graphs, self._slices = items, graphs, [torch.arange(3)]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._items = {**self._items, name: value}


def test_records_are_batches() -> None:
    record = Record(2, x=torch.ones(3, 2), edges=torch.zeros(2, 4))
    leaves, rebuild = flatten(record)
    again = rebuild([2 * leaf for leaf in leaves])
    assert torch.equal(again["x"], torch.full((3, 2), 2.0)) and torch.equal(record["x"], torch.ones(3, 2))
    assert again._graphs == 2 and not hasattr(again, "_slices") and hasattr(record, "_slices")
    assert batch_structure(record) != batch_structure(Record(3, **record.to_dict()))
