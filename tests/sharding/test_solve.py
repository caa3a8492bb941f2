"""The integer program's choice is the best of all choices, keeps to every demand, and is right when run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random
from typing import TypeVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.placement.enumerate_strategies import StrategyOptions, enumerate_strategies
from polylane.placement.operator_view import OperatorView, view_operators
from polylane.placement.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Replicate, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands, admissible_options
from polylane.sharding.constraints import choice_labels
from polylane.sharding.cost_model import CostSetting, LayoutPrediction, list_redistributions, predict_split
from polylane.sharding.solve import SLACK, carry_over, equivalence_classes, solve
from tests.support import subsets

FAST = RankSpeed(flops=1e9, bytes=1e9, latency=1e-7, bandwidth=1e9)
SLOW = RankSpeed(flops=1e9, bytes=1e9, latency=1e-3, bandwidth=1e6)
PLAIN = RankSpeed()

T = TypeVar("T")


class Mlp(nn.Module):
    """Blocks of two layers each, with a residual connection."""

    def __init__(self, hidden: int, wide: int, blocks: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(hidden, wide, bias=bias) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(wide, hidden, bias=bias) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


class Pair(nn.Module):
    """Two layers without a bias, the first one frozen where asked."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def graph_of(model: nn.Module, *shape: int) -> Graph:
    return capture(model, square, (torch.randn(shape), torch.randn(shape)))


def shown(model: nn.Module, degree: int, *shape: int) -> tuple[OperatorView, StrategyOptions]:
    seen = view_operators(graph_of(model, *shape), shape[0], degree)
    return seen, enumerate_strategies(seen, degree)


def every(choices: StrategyOptions, degree: int) -> Iterator[AxisSplit]:
    names, keys = list(choices.strategies), list(choices.source_placements)
    for steps in itertools.product(*choices.strategies.values()):
        for sources in itertools.product(*choices.source_placements.values()):
            yield AxisSplit(degree, dict(zip(names, steps, strict=True)), dict(zip(keys, sources, strict=True)))


def possible(setting: CostSetting, split: AxisSplit) -> bool:
    """What is written in place is not moved."""
    return all(not use.is_write for moving in list_redistributions(setting, split) for use in moving.uses)


def limited(prediction: LayoutPrediction, purpose: str) -> float:
    return prediction.parameters if purpose == "tensor" else prediction.activations


FROZEN = partial(Pair, frozen=True)


class Fork(nn.Module):
    """A value with two readers, one of which needs it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.scale.cos()
        return (wide.sin() * wide).sum() + x.mean()


@cache
def captured(model: Callable[[], nn.Module]) -> Graph:
    return capture(model(), scalar, torch.randn(2, 4))


def scalar(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def fewer(found: StrategyOptions, most: int, random: int) -> StrategyOptions:
    """So few choices of each kind that all combinations can be tried; the first one is always possible."""
    pick = Random(random)

    def some(each: tuple[T, ...]) -> tuple[T, ...]:
        return (each[0], *pick.sample(each[1:], min(most - 1, len(each) - 1)))

    return StrategyOptions(
        {k: some(v) for k, v in found.strategies.items()}, {k: some(v) for k, v in found.source_placements.items()}
    )


@settings(max_examples=subsets.examples(20), deadline=None)
@given(
    st.sampled_from([Pair, FROZEN, Fork]),
    st.sampled_from(["tensor", "sequence", "data"]),
    st.sampled_from([FAST, SLOW, PLAIN]),
    st.integers(0, 1000),
)
def test_no_choice_is_better(model: Callable[[], nn.Module], purpose: str, rates: RankSpeed, random: int) -> None:
    seen = view_operators(captured(model), 2, 2)
    demands = SplitDemands(purpose, {"input:0": "shard(0)"} if purpose == "data" else {})
    choices = fewer(
        admissible_options(seen, enumerate_strategies(seen, 2), 2, demands), 3 if len(seen.operators) < 6 else 2, random
    )
    with patch("polylane.sharding.solve.GAP", 1e-7):
        split = solve(seen, choices, 2, SplitDemands(purpose), rates=rates)
    setting = CostSetting(seen, 2, rates, {})
    found = predict_split(setting, split)
    tried = [predict_split(setting, other) for other in every(choices, 2) if possible(setting, other)]
    least = min(limited(p, purpose) for p in tried)
    assert possible(setting, split)
    assert limited(found, purpose) <= (1 + SLACK) * least * (1 + 5e-3)
    best = min(p.seconds for p in tried if limited(p, purpose) <= limited(found, purpose) * (1 + 1e-9))
    assert found.seconds == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_columns_then_rows(degree: int) -> None:
    """Megatron-LM's split of an MLP: one collective forward and one backward for every block."""
    seen, offered = shown(Mlp(96, 384, 3), degree, 4, 96)
    split = solve(seen, offered, degree, SplitDemands("tensor"))
    for i in range(3):
        assert split.source_placements[f"parameter:up.{i}.weight", 0] == Shard(0, even_cuts(384, degree))
        assert split.source_placements[f"parameter:up.{i}.bias", 0] == Shard(0, even_cuts(384, degree))
        assert split.source_placements[f"parameter:down.{i}.weight", 0] == Shard(1, even_cuts(384, degree))
    setting = CostSetting(seen, degree, PLAIN, {})
    names = [(m.source, m.target) for m in list_redistributions(setting, split) if not m.key[0].startswith("parameter")]
    assert len([pair for pair in names if pair[0] == PARTIAL]) == 3


def test_parts_are_as_small_as_they_can_be() -> None:
    seen, offered = shown(Mlp(32, 128, 2), 4, 4, 32)
    split = solve(seen, offered, 4, SplitDemands("tensor"))
    found = predict_split(CostSetting(seen, 4, PLAIN, {}), split)
    whole = sum(info.bytes for info in seen.graph.parameters.values())
    rows = sum(info.bytes for name, info in seen.graph.parameters.items() if "down" in name and "bias" in name)
    least = whole / 4 + rows  # the bias of what is summed is added once
    assert found.parameters <= (1 + SLACK) * least * (1 + 1e-6)
    assert split.report.status == "optimal"


def test_classes_change_nothing_where_blocks_are_alike() -> None:
    seen, offered = shown(Mlp(32, 128, 8), 2, 4, 32)
    setting = CostSetting(seen, 2, PLAIN, {})
    labels = choice_labels(setting, admissible_options(seen, offered, 2, SplitDemands("tensor")))

    def solved() -> tuple[int, float]:
        split = solve(seen, offered, 2, SplitDemands("tensor"))
        return len(set(equivalence_classes(seen, labels).values())), predict_split(setting, split).seconds

    shared, seconds = solved()
    with patch("polylane.sharding.solve.HOPS", 1000):
        single, alone = solved()
    assert shared < single
    assert seconds == pytest.approx(alone, rel=1e-3)


def test_a_sequence_axis_cuts_inside_samples_and_keeps_parameters_whole() -> None:
    seen, offered = shown(Mlp(32, 64, 2), 2, 3, 16, 32)
    split = solve(seen, offered, 2, SplitDemands("sequence"))
    for step in seen.operators:
        for placement in (*split.strategies[step.name].inputs, *split.strategies[step.name].outputs):
            assert not (isinstance(placement, Shard) and placement.dim == 0 and placement.size == 3)
    assert all(isinstance(p, Replicate) for p in split.source_placements.values())
    assert split.source_placements["parameter:up.0.weight", 0] == REPLICATE_PARTIAL_GRAD
    linear = split.strategies["up.0/linear"]
    assert linear.outputs == (Shard(1, even_cuts(16, 2)),)


def test_a_data_axis_cuts_what_is_pinned() -> None:
    seen, offered = shown(Mlp(32, 64, 2), 2, 4, 32)
    split = solve(seen, offered, 2, SplitDemands("data", {"input:0": "shard(0)", "input:1": "shard(0)"}))
    assert split.source_placements["input:0", 0] == Shard(0, even_cuts(4, 2))
    assert all(
        p == REPLICATE_PARTIAL_GRAD for key, p in split.source_placements.items() if key[0].startswith("parameter")
    )
    assert {split.strategies[n].outputs[0] for n in ("up.0/linear", "down.1/linear")} == {Shard(0, even_cuts(4, 2))}


def test_pins_are_kept() -> None:
    seen, offered = shown(Mlp(32, 64, 2), 2, 4, 32)
    pins = {"up.0.weight": "shard(1)", "down.1.weight": "replicate", "down.0/linear": "shard(1)"}
    split = solve(seen, offered, 2, SplitDemands("tensor", pins))
    assert split.source_placements["parameter:up.0.weight", 0] == Shard(1, even_cuts(32, 2))
    assert isinstance(split.source_placements["parameter:down.1.weight", 0], Replicate)
    assert split.strategies["down.0/linear"].outputs == (Shard(1, even_cuts(32, 2)),)


def test_a_pin_that_nothing_meets() -> None:
    seen, offered = shown(Mlp(32, 64, 2), 2, 4, 32)
    with pytest.raises(PolylaneError, match=r"placements\.up\.0\.bias\.tensor: partial: .* replicate, shard\(0\)"):
        solve(seen, offered, 2, SplitDemands("tensor", {"up.0.bias": "partial"}))
    with pytest.raises(PolylaneError, match=r"placements\.up\.0/linear\.tensor: shard\(0\): .*replicate"):
        solve(seen, offered, 2, SplitDemands("tensor", {"up.0/linear": "shard(0)"}))


def test_two_axes_cut_no_dimension_twice() -> None:
    seen, offered = shown(Mlp(32, 64, 3), 2, 4, 32)
    first = solve(seen, offered, 2, SplitDemands("tensor"))
    second = solve(seen, offered, 2, SplitDemands("tensor", other_axes={"a": first}))
    for step in seen.operators:
        one, two = first.strategies[step.name], second.strategies[step.name]
        for a, b in zip((*one.inputs, *one.outputs), (*two.inputs, *two.outputs), strict=True):
            assert not (isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim)
    both = [
        key
        for key, p in first.source_placements.items()
        if isinstance(p, Shard) and isinstance(second.source_placements[key], Shard)
    ]
    assert any(key[0].endswith("weight") for key in both)


def test_another_graph_of_the_model_keeps_its_parameters() -> None:
    model = Mlp(32, 64, 2)
    seen, offered = shown(model, 2, 4, 32)
    split = solve(seen, offered, 2, SplitDemands("tensor"))

    def other(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * batch[1]).abs().mean()

    graph = capture(model, other, (torch.randn(4, 32), torch.randn(4, 32)), training=False)
    there = view_operators(graph, 4, 2)
    carried = carry_over(split, there, enumerate_strategies(there, 2), "tensor", {})
    for key, placement in split.source_placements.items():
        if key[0].startswith("parameter"):
            assert carried.source_placements[key] == placement


def test_results_are_whole() -> None:
    seen, offered = shown(Mlp(32, 64, 1), 2, 4, 32)
    split = solve(seen, offered, 2, SplitDemands("tensor"))
    setting = CostSetting(seen, 2, PLAIN, {})
    for key in seen.output_keys:
        ends = [
            m.target
            for m in list_redistributions(setting, split)
            if m.key == key and any(u.step is None for u in m.uses)
        ]
        assert split.placement(key) == REPLICATE or ends == [REPLICATE]
