"""A split that was chosen for some number of samples holds for every other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.placement.enumerate_strategies import enumerate_strategies
from polylane.placement.operator_view import view_operators
from polylane.placement.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, even_cuts, join_cuts
from polylane.placement.strategy import Strategy
from polylane.sharding.admissible import SplitDemands, cuts_each_sample_alike, sample_dims, shards_samples
from polylane.sharding.carry_over import _replicated_strategy, carry_over_split
from polylane.sharding.solve import solve
from tests.support import subsets


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


@settings(max_examples=subsets.examples(15), deadline=None)
@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from([2, 3]), st.sampled_from(["tensor", "sequence"]))
def test_the_same_for_other_samples(before: int, after: int, degree: int, purpose: str) -> None:
    first, second = view_operators(mixed(), before, degree), view_operators(mixed(), after, degree)
    split = solve(first, enumerate_strategies(first, degree), degree, SplitDemands(purpose))
    moved = carry_over_split(split, first, second, enumerate_strategies(second, degree))
    assert moved.source_placements == split.source_placements
    for name, strategy in split.strategies.items():
        assert (moved.strategies[name].inputs, moved.strategies[name].outputs) == (strategy.inputs, strategy.outputs), (
            name
        )


@given(st.integers(1, 4), st.integers(2, 12), st.integers(2, 4))
def test_inside_samples(samples: int, length: int, degree: int) -> None:
    alike = join_cuts([even_cuts(length, degree)] * samples)
    assert cuts_each_sample_alike(alike, samples)
    assert not shards_samples(Shard(0, alike), frozenset({0}), samples)
    whole = even_cuts(samples * length, degree)
    assert cuts_each_sample_alike(whole, samples) == (samples == 1 or whole == alike)
    assert not shards_samples(Shard(0, whole), frozenset({1}), samples)


def test_dimensions_of_samples() -> None:
    seen = view_operators(mixed(), 3, 2)
    dims = sample_dims(seen)
    assert dims["input:0", 0] == dims["up/linear", 0] == frozenset({0})
    assert dims["parameter:up.weight", 0] == frozenset()


def test_flattened_dimensions_follow() -> None:
    """(batch * length) is cut in every sample alike, whatever the number of samples."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]).flatten(0, 1) - batch[1].flatten(0, 1)).pow(2).mean()

    graph = capture(Mixed(), loss, (torch.randn(2, 12, 8), torch.randn(2, 12, 8)))
    first, second = view_operators(graph, 2, 2), view_operators(graph, 5, 2)
    offered = enumerate_strategies(first, 2)
    flat = next(step.name for step in first.operators if step.call.base == "flatten")
    if len(offered.strategies[flat]) < 3:
        pytest.skip("no rule for flatten")
    split = solve(first, offered, 2, SplitDemands("sequence"))
    assert split.strategies[flat].outputs == (Shard(0, join_cuts([even_cuts(12, 2)] * 2)),)
    moved = carry_over_split(split, first, second, enumerate_strategies(second, 2))
    for step in second.operators:
        for placement in moved.strategies[step.name].outputs:
            if isinstance(placement, Shard) and placement.size == 60:
                assert placement == Shard(0, join_cuts([even_cuts(12, 2)] * 5))


def test_whole_where_nothing_is_alike() -> None:
    plain = Strategy("replicate", (REPLICATE,) * 3, (REPLICATE,))
    shared = Strategy("shared", (REPLICATE_PARTIAL_GRAD,) * 3, (REPLICATE_PARTIAL_GRAD,))
    cut = Strategy(
        "cut", (Shard(0, even_cuts(4, 2)), REPLICATE_PARTIAL_GRAD, REPLICATE_PARTIAL_GRAD), (Shard(0, even_cuts(4, 2)),)
    )
    assert _replicated_strategy([plain, shared, cut]) == shared
    assert _replicated_strategy([plain, cut]) == plain
