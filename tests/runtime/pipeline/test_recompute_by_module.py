"""Recomputation said of modules: no number changes, bytes are those predicted, and what leaves a module is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.cost.memory.recompute_budget import BudgetTooSmall, dropped_on_stages
from polylane.cost.memory.recompute_choice import SavedValues
from polylane.graph.capture.capture import capture
from polylane.graph.capture.repeatable import NOTHING_DROPPED
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, cut_positions
from polylane.graph.python_state.module_paths import is_inside
from polylane.plan.recompute import RecomputeRule
from tests.support.reference.recomputed_stages import (
    SAMPLES,
    Passes,
    assert_equal,
    captured,
    drop,
    predicted,
    run_passes,
    seeded,
    stage_runner,
    trace,
)
from tests.support.workers.training import classify

RULES = {
    "vit": [
        {"vit.layers.0": "full"},
        {"vit.layers.0": "full", "vit.layers.1": "selective"},
        {"default": "full", "vit.layers.1": "none"},
        {"vit.layers": "full", "vit.layers.1.attention": "none", "classifier": "full"},
        {"vit.layers.1": "budget:7KB", "default": "selective"},
    ],
    "moe": [{"blocks.1": "full"}],
    "lstm": [{"lstm": "full"}],
}


@pytest.mark.parametrize("name", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("moe", "lstm"))])
def test_numbers_are_the_same_and_bytes_those_predicted(name: str) -> None:
    case, graph = captured(name)
    batch = case.batch(SAMPLES, 0)

    def passes(rule: RecomputeRule) -> Passes:
        model, dropped = seeded(case), drop(graph, rule)
        found, need = run_passes(stage_runner(model, graph, dropped), model, batch, SAMPLES), predicted(graph, dropped)
        assert found.held == pytest.approx(need.live_bytes, abs=16, rel=0.001)
        assert found.forward_peak == pytest.approx(need.forward_peak, abs=16, rel=0.001)
        assert found.backward_peak <= 1.05 * need.backward_peak + 16
        return found

    none, full = passes("none"), passes("full")
    for rule in RULES[name]:
        found = passes(rule)
        assert_equal(found, none)
        assert full.held < found.held < none.held


def kept(graph: Graph, rule: RecomputeRule) -> float:
    return predicted(graph, drop(graph, rule)).live_bytes


def test_what_is_said_of_more_modules_keeps_less() -> None:
    _, graph = captured("vit")
    steps: list[Mapping[str, str]] = [
        {"vit.layers.0": "none"},
        {"vit.layers.0": "selective"},
        {"vit.layers.0": "full"},
        {"vit.layers": "full"},
        {"vit.layers": "full", "default": "full"},
    ]
    sizes = [kept(graph, rule) for rule in steps]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert sizes[0] == kept(graph, "none") and sizes[-1] >= kept(graph, "full")


def test_full_on_every_part_is_full_but_for_what_crosses_between_them() -> None:
    _, graph = captured("vit")
    rule = {"vit.layers.0": "full", "vit.layers.1": "full", "default": "full"}
    parts, whole = drop(graph, rule), drop(graph, "full")
    assert parts.values <= whole.values

    def part(module: str) -> str:
        return next((key for key in rule if is_inside(module, key)), "default")

    parts_of = {node.name: part(node.module) for node in graph.nodes}
    values = SavedValues(graph, trace(graph))
    crossing = {
        key
        for node in graph.nodes
        for name in node.inputs
        if name in parts_of and parts_of[name] != parts_of[node.name]
        for key in values.values_of[name]
    }
    assert 0 <= kept(graph, rule) - kept(graph, "full") <= values.bytes(crossing)


def test_a_stage_of_one_module_recomputes_what_the_stage_would() -> None:
    _, graph = captured("vit")
    keeping = trace(graph)
    at = [i for i in cut_positions(graph) if "vit.layers.1" in graph.nodes[i].module]
    before = [i for i in cut_positions(graph) if is_inside(graph.nodes[i].module, "vit.layers.0")]
    partition = Partition(graph, (before[0], at[0]))
    assert {n.module.split(".")[2] for n in partition.nodes(1) if not n.recomputable} == {"0"}

    def dropped(rule: RecomputeRule) -> object:
        return dropped_on_stages(partition, ["none", rule, "none"], [keeping] * 3)[1]

    for mode in ("selective", "full", "budget:8KB"):
        assert dropped(mode) == dropped({"vit.layers.0": mode}) == dropped({"vit": mode, "vit.layers.1": "none"})
        assert dropped(mode) != NOTHING_DROPPED
    assert dropped({"vit.layers.1": "full"}) == NOTHING_DROPPED


def test_a_budget_of_a_module_that_nothing_meets_names_it_with_the_least_that_would_do() -> None:
    _, graph = captured("vit")
    with pytest.raises(
        BudgetTooSmall, match=r"vit\.layers\.1 on stage 0 needs a budget of .* and 10B is less"
    ) as caught:
        drop(graph, {"vit.layers.1": "budget:10B", "vit.layers.0": "full"})
    enough = drop(graph, {"vit.layers.1": f"budget:{int(caught.value.least) + 1}B"})
    assert enough and {name.split("/")[0][:12] for name in enough.again} == {"vit.layers.1"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))).sin())
        return found


class Shared(nn.Module):
    """A block that is called three times, twice by one name; and a checkpoint over two others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.first, self.second, self.head = Block(), Block(), Block(), nn.Linear(16, 4)
        self.two = self.one

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.two(self.one(x)))
        y: Tensor = checkpoint(lambda z: self.second(self.first(z)), x, use_reentrant=False)
        logits: Tensor = self.head(y)
        return logits


def test_a_module_that_is_called_twice_is_recomputed_in_both_calls_and_checkpoints_stay_whole() -> None:
    torch.manual_seed(1)
    batch = torch.randn(8, 16), torch.arange(8) % 4
    torch.manual_seed(0)
    graph = capture(Shared(), classify, batch)

    def again(rule: RecomputeRule) -> set[str]:
        return set(drop(graph, rule).again)

    tanh = {"one/tanh", "one/tanh#2"}
    assert again({"one": "full"}) >= tanh and "two/tanh" not in again({"one": "full"})
    assert again({"two": "full"}) & {*tanh, "two/tanh"} == {"two/tanh"}
    # The user's checkpoint reaches over two modules, whatever is said of one of them.
    whole = drop(graph, "none")
    assert {re.split("[./]", name)[0] for name in whole.again} == {"first", "second"}
    assert drop(graph, {"first": "none", "one": "full"}).values >= whole.values
    found = []
    for rule in ("none", {"one": "full", "first": "none"}, {"one": "full", "first": "budget:60KB"}):
        torch.manual_seed(0)
        model = Shared()
        dropped = drop(graph, rule)
        found.append(run_passes(stage_runner(model, graph, dropped), model, batch, 8))
        assert found[-1].held == pytest.approx(predicted(graph, dropped).live_bytes, abs=16)
        assert_equal(found[-1], found[0])
    assert found[1].held < found[0].held


@pytest.mark.parametrize("rule", [{"vit.layers.0": "full"}, {"default": "full", "vit.layers.1.mlp": "none"}])
def test_backward_passes_in_two_halves_drop_the_same(rule: RecomputeRule) -> None:
    case, graph = captured("vit")
    found = []
    for each in ("none", rule):
        model = seeded(case)
        runner = stage_runner(model, graph, drop(graph, each), in_halves=True)
        found.append(run_passes(runner, model, case.batch(SAMPLES, 0), SAMPLES))
    assert_equal(found[1], found[0])
    assert found[1].held == pytest.approx(kept(graph, rule), rel=0.05, abs=16)
    assert found[1].held < found[0].held
