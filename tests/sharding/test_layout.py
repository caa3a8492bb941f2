"""Layouts: whatever the number of samples in hand, every replica's part has the size that all others expect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import split_bounds
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.placement.operator_view import view_operators
from polylane.placement.placement import Shard
from polylane.sharding.layout import Layout, choose_layout, layout_like

SAMPLES = (1, 2, 3, 5, 8, 13)


class Net(nn.Module):
    """One layer, behind what no graph shows where it looks at the data."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.fc, self.looks = nn.Linear(6, 4), looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.sum().item() > 1e9:
            x = x * 2
        y: Tensor = self.fc(x)
        return y


def contrast(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    z = model(batch[0])
    return F.cross_entropy(z @ z.t(), torch.arange(len(z))) * batch[1].mean()


def batch_of(samples: int, *more: Tensor) -> tuple[Tensor, ...]:
    return torch.randn(samples, 6), torch.ones(7), *more


def graph_of(looks: bool, *more: Tensor) -> Graph:
    return capture(Net(looks), contrast, batch_of(5, *more))


def rows(layout: Layout, graph: Graph, samples: int) -> list[list[int]]:
    """Of every input: how many rows each replica has."""
    _, splits = layout.at(samples)
    shown = view_operators(graph, samples, 2)
    found = []
    for key, source in shown.sources.items():
        if source.role[0] == "input":
            placed: Any = splits["data"].source_placements[key]
            whole = source.value.shape[0]
            found.append([placed.local_length(i) if isinstance(placed, Shard) else whole for i in range(2)])
    return found


@pytest.mark.parametrize("looks", [True, False])
def test_every_number_of_samples_is_divided_as_batches_are(looks: bool) -> None:
    graph = graph_of(looks)
    assert graph.is_opaque == looks
    layout = choose_layout(graph, {"data": 2}, 8, sampled=[True, False])
    for samples in SAMPLES:
        shares = [stop - start for start, stop in split_bounds(samples, 2)]
        assert rows(layout, graph, samples) == [shares, [7, 7]]


@pytest.mark.parametrize("looks", [True, False])
def test_a_batch_of_another_form_is_divided_by_what_grows(looks: bool) -> None:
    graph, other = graph_of(looks), graph_of(looks, torch.ones(5), torch.ones(3))
    main = choose_layout(graph, {"data": 2}, 8, sampled=[True, False])
    for samples in SAMPLES:
        shares = [stop - start for start, stop in split_bounds(samples, 2)]
        assert rows(layout_like(main, other), other, samples) == [shares, [7, 7], shares, [3, 3]]


def test_a_graph_for_one_number_of_samples_is_refused() -> None:
    graph = graph_of(False)
    (x,) = [n for n in graph.code.fx.nodes if n.meta.get("role") == ("input", 0)]
    x.meta["val"] = torch.empty(5, 6, device="meta")
    with pytest.raises(PolylaneError, match=r"hold the 8 samples of a batch together, .* with 5 samples and no other"):
        choose_layout(graph, {"data": 2}, 8, sampled=[True, False])
