"""What autocast makes of a graph is found without the device that it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.operators.autocast_reads import dtypes_under_autocast, find_cast_weights, find_weight_reads
from tests.support.workers.training import classify


class Layers(nn.Module):
    """A linear layer, a normalization, and a product with a vector, which autocast casts on GPUs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.vector, self.unread = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        return torch.stack([torch.mv(hidden.float(), self.vector), hidden.sum(1), torch.ones(len(x))], 1)


EXAMPLE = torch.ones(5, 4), torch.zeros(5, dtype=torch.long)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dtypes_are_those_of_the_type_of_device(device: str) -> None:
    graph = capture(Layers(), classify, EXAMPLE)
    dtypes = dtypes_under_autocast(graph, device, torch.bfloat16)
    assert dtypes["first/linear"] == torch.bfloat16
    assert dtypes["norm/layer_norm"] == (torch.bfloat16 if device == "cpu" else torch.float32)
    assert dtypes["mv"] == (torch.float32 if device == "cpu" else torch.bfloat16)
    assert not torch.is_autocast_enabled(device)


def test_cast_is_what_all_devices_cast() -> None:
    graph = capture(Layers(), classify, EXAMPLE)
    reads = find_weight_reads(graph, torch.bfloat16)
    assert reads.cast == {"first.weight", "first.bias"} == find_cast_weights([graph], torch.bfloat16)
    assert reads.otherwise == {"norm.weight", "norm.bias", "vector"}
    assert find_cast_weights([graph], None) == frozenset()


def test_of_several_graphs_none_may_read_it_otherwise() -> None:
    class Adding(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.first.bias.sum()

    graphs = [capture(model, classify, EXAMPLE) for model in (Layers(), Adding())]
    assert find_cast_weights(graphs, torch.bfloat16) == {"first.weight"}
