"""Operators of which each sample has its own rows: cells, distances, bags; and an average over all batches so far."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from tests.support.workers.training import assert_same, batch_of, plainly, trained


class Rows(nn.Module):
    """Every sample by itself, but for the statistics of a batch normalization without a momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.long, self.norm = nn.GRUCell(6, 8), nn.LSTMCell(6, 8), nn.BatchNorm1d(8, momentum=None)
        self.bag, self.last = nn.EmbeddingBag(12, 4, mode="sum"), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(4, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 8)
        h = self.norm(self.cell(x, zeros) + self.long(x, (zeros, zeros))[0])
        bags: Tensor = self.bag((x[:, :3] * 3).long().clamp(-5, 5) + 6)
        out: Tensor = self.last(torch.cdist(h, self.codes) + bags)
        return out


@pytest.mark.parametrize(
    ("plan", "microbatches"), [("data=2,pipeline=2,microbatches=2", 2), ("data=3,shard=parameters", 1)]
)
def test_they_are_divided_and_equal_one_device(plan: str, microbatches: int) -> None:
    batches = [batch_of(8, seed) for seed in range(3)]
    assert_same(trained(Rows(), plan, batches)[0], plainly(Rows(), batches, microbatches=microbatches))


class Kept(nn.Module):
    """Moves running statistics by the mean of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x.unflatten(1, (2, 3))).flatten(1))
        return out


class Unruled(nn.Module):
    """An operator without a rule, which treats each sample independently all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.trapezoid(x)[:, None].expand(-1, 5))
        return out


class Meeting(torch.autograd.Function):
    """Divides its gradient by the norm over all samples."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / (gradient.norm() + 1e-3)


class Met(nn.Module):
    """A custom function whose trace shows that samples meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Meeting.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Kept, "moves the buffer norm.running_mean by a mean over its batch"),
        (Unruled, r"nothing shows that trapezoid .* treats each sample independently: there is no rule for trapezoid;"),
        (Met, r"in whose backward pass the samples of a batch meet; use microbatches=1$"),
    ],
)
def test_what_is_refused_is_said_as_it_is(model: type[nn.Module], told: str) -> None:
    with pytest.raises(PolylaneError, match=told):
        trained(model().double(), "data=1,microbatches=2", [batch_of(8)])
