"""A split that was chosen for some number of samples holds for every other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.graph.capture import capture
from polylane.graph.graph import Graph
from polylane.placement.call import Strategy
from polylane.placement.options import options
from polylane.placement.placement import REPLICATE, SHARED, Shard, even, joined
from polylane.placement.view import view
from polylane.planner.sample_cuts import cuts_samples, inside_samples, sample_dims
from polylane.planner.solve import solve
from polylane.planner.transfer import _whole, transfer


class Mixed(nn.Module):
    """Layers over (batch, length, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


GRAPH = None


def mixed() -> Graph:
    global GRAPH
    if GRAPH is None:
        GRAPH = capture(Mixed(), square, (torch.randn(2, 12, 8), torch.randn(2, 12, 8)))
    return GRAPH


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from([2, 3]), st.sampled_from(["tensor", "sequence"]))
def test_the_same_for_other_samples(before: int, after: int, degree: int, purpose: str) -> None:
    first, second = view(mixed(), before, degree), view(mixed(), after, degree)
    split = solve(first, options(first, degree), degree, purpose=purpose)
    moved = transfer(split, first, second, options(second, degree))
    assert moved.sources == split.sources
    for name, strategy in split.steps.items():
        assert (moved.steps[name].inputs, moved.steps[name].outputs) == (strategy.inputs, strategy.outputs), name


@given(st.integers(1, 4), st.integers(2, 12), st.integers(2, 4))
def test_inside_samples(samples: int, length: int, degree: int) -> None:
    alike = joined([even(length, degree)] * samples)
    assert inside_samples(alike, samples)
    assert not cuts_samples(Shard(0, alike), frozenset({0}), samples)
    whole = even(samples * length, degree)
    assert inside_samples(whole, samples) == (samples == 1 or whole == alike)
    assert not cuts_samples(Shard(0, whole), frozenset({1}), samples)


def test_dimensions_of_samples() -> None:
    seen = view(mixed(), 3, 2)
    dims = sample_dims(seen)
    assert dims["input:0", 0] == dims["up/linear", 0] == frozenset({0})
    assert dims["parameter:up.weight", 0] == frozenset()


def test_flattened_dimensions_follow() -> None:
    """(batch * length) is cut in every sample alike, whatever the number of samples."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).flatten(0, 1) - batch[1].flatten(0, 1)).pow(2).mean()

    graph = capture(Mixed(), loss, (torch.randn(2, 12, 8), torch.randn(2, 12, 8)))
    first, second = view(graph, 2, 2), view(graph, 5, 2)
    offered = options(first, 2)
    flat = next(step.name for step in first.steps if step.call.base == "flatten")
    if len(offered.steps[flat]) < 3:
        pytest.skip("no rule for flatten")
    split = solve(first, offered, 2, purpose="sequence")
    assert split.steps[flat].outputs == (Shard(0, joined([even(12, 2)] * 2)),)
    moved = transfer(split, first, second, options(second, 2))
    for step in second.steps:
        for placement in moved.steps[step.name].outputs:
            if isinstance(placement, Shard) and placement.size == 60:
                assert placement == Shard(0, joined([even(12, 2)] * 5))


def test_whole_where_nothing_is_alike() -> None:
    plain = Strategy("replicate", (REPLICATE,) * 3, (REPLICATE,))
    shared = Strategy("shared", (SHARED,) * 3, (SHARED,))
    cut = Strategy("cut", (Shard(0, even(4, 2)), SHARED, SHARED), (Shard(0, even(4, 2)),))
    assert _whole([plain, shared, cut]) == shared
    assert _whole([plain, cut]) == plain
