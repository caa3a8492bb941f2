"""Questions to a batch: what follows from the inputs is captured, and holds for batches that answer alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.readings.batch_readings import are_answered


def squares(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(*batch).square().mean()
    return loss


class Asks(nn.Module):
    """Goes another way where a category is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.unknown = nn.Embedding(5, 4), nn.Embedding(1, 4)

    def forward(self, ids: Tensor) -> Tensor:
        missing = ids < 0
        x: Tensor = self.known(ids.clamp_min(0))
        if missing.any():
            x = torch.where(missing[..., None], self.unknown(torch.zeros_like(ids)), x)
        return x


class Pools(nn.Module):
    """Sums rows by group, as many groups as the indices name; written in place on the way to the size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        groups, _ = groups.sort()
        counts = torch.zeros(int(groups.max()) + 1, dtype=torch.long)
        counts[groups] += 1
        counts.scatter_add_(0, groups, torch.ones_like(groups))
        most = int(counts.max())
        y: Tensor = self.fc(x)
        return torch.zeros(len(counts), 4, dtype=y.dtype).index_add(0, groups, y) * most


class DropsLoops(nn.Module):
    """Leaves out edges from a node to itself, and returns early where no edge is left."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        kept = edges[:, edges[0] != edges[1]]
        if kept.numel() == 0:
            return y
        return y + torch.zeros_like(y).index_add(0, kept[1], y[kept[0]])


def captured(model: nn.Module, *batch: Tensor) -> Any:
    return capture(model, squares, batch)


def answers(graph: Any, *batch: Tensor) -> bool:
    return are_answered(graph.code.readings, flatten(batch)[0])


def test_a_way_that_follows_from_the_inputs_is_captured_with_its_condition() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[0, 1], [2, 3], [4, 0]])
    graph = captured(Asks(), ids)
    assert not graph.notes
    assert [reading.answer for reading in graph.code.readings] == [False]
    assert answers(graph, ids.flip(0)) and not answers(graph, ids - 1)
    other = captured(Asks(), ids - 1)
    assert answers(other, ids - 1) and not answers(other, ids)


def test_a_size_that_follows_from_the_inputs_is_captured_with_its_condition() -> None:
    torch.manual_seed(0)
    x, groups = torch.randn(6, 3), torch.tensor([0, 2, 2, 1, 0, 2])
    graph = captured(Pools(), x, groups)
    assert not graph.notes
    assert [reading.answer for reading in graph.code.readings] == [2, 4]
    kept = groups.clone()
    assert answers(graph, x, groups.flip(0))
    assert torch.equal(groups, kept)
    assert not answers(graph, x, torch.tensor([0, 1, 1, 1, 0, 0]))  # fewer groups
    assert not answers(graph, x, torch.tensor([0, 2, 1, 1, 0, 2]))  # as many, but none of three


def test_a_condition_on_a_size_that_the_inputs_decide_is_kept_and_not_the_size() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    graph = captured(DropsLoops(), x, torch.tensor([[0, 1, 2], [1, 1, 3]]))
    assert not graph.notes
    assert answers(graph, x, torch.tensor([[0, 1, 2], [0, 1, 3]]))  # one edge is left of three, where there were two
    assert not answers(graph, x, torch.tensor([[0, 1, 2], [0, 1, 2]]))


class AsksOfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 2 if (y > 0).any() else y


class AsksForNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * x.mean().item() if x.dim() else y


class AsksOfRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 2 if (x * torch.rand(3) > 0).any() else y


@pytest.mark.parametrize("model", [AsksOfWeights, AsksOfRandom])
def test_what_does_not_follow_from_the_inputs_alone_stays_the_users_python(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    graph = captured(model(), torch.randn(4, 3))
    assert graph.is_opaque or any(node.is_own_python for node in graph.nodes)
    assert not graph.code.readings


def test_a_real_number_is_no_condition() -> None:
    torch.manual_seed(0)
    assert not captured(AsksForNumbers(), torch.randn(4, 3)).code.readings


def test_constants_that_the_inputs_are_written_into_follow_from_them() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            seen = torch.zeros(5, dtype=torch.bool)
            seen[at] = True
            return F.relu(self.fc(x)) if seen.all() else self.fc(x)

    torch.manual_seed(0)
    x, some = torch.randn(6, 2), torch.tensor([0, 1, 2, 3, 3, 3])
    graph = captured(Writes(), x, some)
    assert [reading.answer for reading in graph.code.readings] == [False]
    assert answers(graph, x, some.flip(0)) and not answers(graph, x, torch.tensor([0, 1, 2, 3, 4, 4]))
