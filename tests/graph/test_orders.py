"""How the parts of a batch make up a value: seen where it can be, and nothing assumed where it cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.capture import capture
from polylane.graph.samples import Order, orders_of, seen_orders

R, A, M, S, X = Order.ROWS, Order.ALIKE, Order.MEAN, Order.SUM, Order.OTHER


class Net(nn.Module):
    """Rows in both orders, means and sums, some of them zero at the start; and what knows no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.still, self.zero = nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).relu()
        turned = rows.transpose(0, 1).reshape(-1, 4).tanh()
        mean, total = rows.square().mean(), rows.exp().sum()
        gated, counted = self.zero * rows.sum(), self.count * rows.sum()
        self.count.add_(1)
        still = self.still.sigmoid()
        most, mask = rows.amax(), rows[:, 0, 0] > 0
        return (turned.mean() + mean + (total + gated + counted) / len(x) + still.sum() + 0 * most + 0 * mask.sum()) / 3


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + 0 * F.mse_loss(x, x)


@pytest.mark.parametrize("looked", [True, False])
def test_every_kind(looked: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 3, 4)
    graph = capture(model, loss, x)
    seen = seen_orders(graph, model, loss, [x]) if looked else {}
    orders = orders_of(graph, seen)
    by_op = {name: order for name, order in orders.items() if "/" not in name or name.startswith("first")}
    expected = {
        "first/linear": (R, R),
        "relu": (R, R),
        "tanh": (X, X),
        "mean": (M, X),
        "exp": (R, R),
        "sum": (S, X),
        "mul": (S, X),
        "sigmoid": (A, A),
        "amax": (X, X),
    }
    for name, (known, unknown) in expected.items():
        assert by_op[name] is (known if looked else unknown), name
    assert by_op["mul#2"] is (S if looked else X)  # zero at the start because of a buffer


def test_a_model_on_the_meta_device_is_not_looked_at() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.empty(5, 3, 4)
    assert seen_orders(capture(model, loss, x), model, loss, [x]) == {}


def test_what_is_promoted_on_one_side_is_equal() -> None:
    """A mask times a number is single, whatever the model is made to be for the proof."""
    from polylane.graph.samples import splits_exactly

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) * (1 - 0.5 * (x[:, :1] > 0))

    model, x = Masked(), torch.randn(6, 4)
    square = lambda m, b: m(b).square().mean()  # noqa: E731
    assert splits_exactly(capture(model, square, x), model, square, [x]) is None
