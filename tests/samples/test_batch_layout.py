"""How the parts of a batch make up a value: seen where it can be computed, else proven, and nothing assumed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.samples.batch_layout import (
    BatchLayout,
    batch_layouts,
    explain_unknown,
    hash_crossing_layouts,
)
from polylane.samples.mean_loss import splits_exactly
from tests.support import models, subsets
from tests.support.reference.computed_layouts import SeenOrders, proven_orders, seen_orders
from tests.support.reference.eager_and_captured import captured

R, A, M, S, X = (
    BatchLayout.SHARDED_BY_SAMPLE,
    BatchLayout.REPLICATED,
    BatchLayout.MEAN,
    BatchLayout.SUM,
    BatchLayout.UNKNOWN,
)

# The user's own Python: nothing can be proven of what it gives.
WITH_LEAVES = ("branching", "custom_function", "moe")


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


def test_rows_of_rounding_are_rows() -> None:
    """What is centered adds up to zero, but for rounding, which differs with the number of samples."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(512, 16)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.first(x)
            none = (rows - rows.mean(1, keepdim=True)).sum(1)
            return (none + rows.square().sum(1)).mean()

    torch.manual_seed(0)
    model, x = Centered(), torch.randn(7, 512)
    graph = capture(model, lambda model, x: model(x), x)
    orders = batch_layouts(graph, seen_orders(graph, model, lambda model, x: model(x), [x]).layouts)
    assert orders["sum"] is R and set(orders.values()) == {R, M}


def test_every_kind() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 3, 4)
    graph = capture(model, loss, x)
    seen = seen_orders(graph, model, loss, [x])
    assert seen.unknown_reason == ""
    orders = batch_layouts(graph, seen.layouts)
    expected = {
        "first/linear": R,
        "relu": R,
        "tanh": X,
        "mean": M,
        "exp": R,
        "sum": S,
        "mul": S,  # zero at the start because of a parameter
        "mul#2": S,  # because of a buffer
        "sigmoid": A,
        "amax": X,
    }
    assert {name: orders[name] for name in expected} == expected
    assert set(batch_layouts(graph, {}).values()) == {X}


def test_a_model_on_the_meta_device_is_not_looked_at() -> None:
    with torch.device("meta"):
        model, x = Net(), torch.empty(5, 3, 4)
    graph = capture(model, loss, x)
    seen = seen_orders(graph, model, loss, [x])
    assert seen == SeenOrders(unknown_reason="the model is on the meta device, where nothing is computed")
    told = explain_unknown(graph, seen.layouts, "mul#2")
    assert told.startswith(": no rule says of first/linear (")


@pytest.mark.parametrize(
    ("name", "mode"),
    subsets.one_in(3, subsets.pairs([*models.CASES, *models.TINY], ["training", "evaluation"]), several=True),
)
def test_what_is_proven_is_what_is_seen(name: str, mode: str) -> None:
    training = mode == "training"
    graph, model, case = captured(name, training=training)
    proven = proven_orders(graph)
    seen = seen_orders(graph, model, case.loss, flatten(case.batch(5, 1))[0])
    assert seen.unknown_reason == ""
    assert {value: seen.layouts.get(value, order) for value, order in proven.items()} == proven
    if name not in WITH_LEAVES:
        lying = [n.name for n in graph.nodes if not n.recomputable and seen.layouts.get(n.name) in (R, A)]
        assert [value for value in lying if value not in proven] == []


class InBits(nn.Module):
    """What it computes in single precision it cannot compute in double: the bits of a number are other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        bits = hidden.view(torch.int32).reshape(len(hidden), 8)
        logits: Tensor = self.head(hidden + (bits < 0).sort(0).values)
        return logits


def test_what_cannot_be_computed_is_not_known() -> None:
    model, batch = InBits(), models.vectors(6, 0)
    graph = capture(model, models.classify, batch)
    seen = seen_orders(graph, model, models.classify, flatten(batch)[0])
    assert seen.layouts["fc/linear"] is R and "head/linear" not in seen.layouts
    assert (
        "cannot be computed in float64 (RuntimeError: " in seen.unknown_reason
        and "test_batch_layout.py:" in seen.unknown_reason
    )
    told = explain_unknown(graph, seen.layouts, "head/linear")
    assert told.startswith(": no rule says of ") and explain_unknown(graph, seen.layouts, "fc/linear") == ""


def test_what_is_no_number_is_not_known() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), models.vectors(6, 0)
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    graph = capture(model, models.classify, batch)
    seen = seen_orders(graph, model, models.classify, flatten(batch)[0])
    assert (
        seen.layouts == {}
        and seen.unknown_reason.startswith("0/linear (")
        and seen.unknown_reason.endswith(") gives what is not a number")
    )


def test_pairs_of_samples_do_not_hide_behind_an_even_division() -> None:
    def pairs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        doubled = batch[0][::2].repeat_interleave(2, 0)[: len(batch[0])]
        return F.cross_entropy(model(doubled), batch[1])

    model, batch = nn.Linear(16, 4), models.vectors(6, 0)
    graph = capture(model, pairs, batch)
    assert batch_layouts(graph, seen_orders(graph, model, pairs, flatten(batch)[0]).layouts)["linear"] is X


def test_what_is_promoted_on_one_side_is_equal() -> None:
    """A mask times a number is single, whatever the model is made to be for the proof."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) * (1 - 0.5 * (x[:, :1] > 0))

    model, x = Masked(), torch.randn(6, 4)
    square = lambda m, b: m(b).square().mean()  # noqa: E731
    assert splits_exactly(capture(model, square, x), model, square, [x]) is None


def graph_and_orders() -> tuple[Graph, dict[str, BatchLayout]]:
    graph = captured("digits")[0]
    return graph, dict.fromkeys((node.name for node in graph.nodes), R)


def test_a_digest_tells_what_crosses_and_how() -> None:
    graph, orders = graph_and_orders()
    middle = len(graph.nodes) // 2
    while graph.nodes[middle].recomputable:
        middle += 1
    partition = Partition(graph, (middle,))
    crossing = {each.value for each in partition.crossings}
    inside = next(node.name for node in graph.nodes if node.name not in crossing)
    own = hash_crossing_layouts(partition, orders)
    assert hash_crossing_layouts(partition, {**orders, inside: X}) == own
    assert all(hash_crossing_layouts(partition, {**orders, value: M}) != own for value in crossing)
    assert hash_crossing_layouts(Partition(graph, ()), orders) != own
