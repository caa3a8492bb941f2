"""A split in words names every module, every collective and every parameter that stays whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.graph.capture.capture import capture
from polylane.placement.enumerate_strategies import StrategyOptions, enumerate_strategies
from polylane.placement.operator_view import OperatorView, view_operators
from polylane.sharding.admissible import SplitDemands
from polylane.sharding.cost_model import CostSetting
from polylane.sharding.explain import Explanation, explain, format_explanation
from polylane.sharding.solve import SolvedSplit, solve


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Blocks, and a parameter that no operator can use in part."""

    def __init__(self, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(blocks)))
        self.scale = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * torch.linalg.matrix_exp(self.scale).mean()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def tower(degree: int) -> tuple[OperatorView, StrategyOptions]:
    seen = view_operators(capture(Tower(64, 5), loss, torch.randn(4, 64)), 4, degree)
    return seen, enumerate_strategies(seen, degree)


def told(degree: int, purpose: str, pins: dict[str, str]) -> Explanation:
    seen, offered = tower(degree)
    split = solve(seen, offered, degree, SplitDemands(purpose, pins))
    return explain(CostSetting(seen, degree, RankSpeed(), {}), split, offered, purpose=purpose, pins=pins)


def test_modules_and_their_collectives() -> None:
    found = told(2, "tensor", {})
    modules = {m.module: m for m in found.modules}
    ups, downs = ([m for m in modules if m.endswith(end)] for end in ("up", "down"))
    assert all(modules[m].operators == (("linear", "columns"),) for m in ups)
    assert all(modules[m].operators == (("linear", "rows"),) for m in downs)
    sums = {c.name for m in downs for c in modules[m].collectives if not c.backward}
    assert sums <= {"all_reduce", "reduce_scatter"} and sums
    assert any("-" in m for m in modules), "blocks that are alike are folded"


def test_bytes() -> None:
    found = told(2, "tensor", {})
    assert found.whole == sum(n * 4 for n in [5 * (2 * 4 * 64 * 64 + 5 * 64) + 9])
    assert found.whole / 2 <= found.parameters < found.whole * 0.55
    text = format_explanation(found)
    assert any(line.startswith("parameters: ") and "on each of 2 ranks" in line for line in text)


def test_what_stays_whole_and_why() -> None:
    found = told(2, "tensor", {"blocks.0.up.weight": "replicate"})
    reasons = {kept.parameter: kept.reason for kept in found.kept}
    assert reasons["blocks.0.up.weight"] == "pinned"
    assert reasons["scale"] == "no rule cuts it in aten.linalg_matrix_exp.default"
    assert any("linear needs it whole" in reason for reason in reasons.values())


def test_what_an_optimizer_keeps_whole_says_why() -> None:
    seen, offered = tower(2)
    names = [str(s.role[1]) for s in seen.sources.values() if s.role[0] == "parameter"]
    split = solve(seen, offered, 2, SplitDemands("tensor", dict.fromkeys(names, "replicate")))
    whole = dict.fromkeys(names, "its optimizer does not run on small parameters (ValueError: no)")
    found = explain(
        CostSetting(seen, 2, RankSpeed(), {}), split, offered, purpose="tensor", pins={"scale": "r"}, whole=whole
    )
    assert {kept.reason for kept in found.kept} == set(whole.values()) and found.parameters == found.whole


def test_only_a_search_that_stopped_early_is_told() -> None:
    seen, offered = tower(2)
    split = solve(seen, offered, 2, SplitDemands("tensor"))
    assert isinstance(split, SolvedSplit) and split.report is not None and split.report.status == "optimal"
    setting = CostSetting(seen, 2, RankSpeed(), {})
    found = explain(setting, split, offered, purpose="tensor")
    assert found.report == split.report and not any("search" in line for line in format_explanation(found))
    for gap, says in ((0.25, "by the model it is within 25 % of it"), (float("inf"), "how far from it is not known")):
        stopped = replace(split.report, status="stopped early", gap=gap, seconds=61.2)
        told = format_explanation(explain(setting, replace(split, report=stopped), offered, purpose="tensor"))
        assert told[-1] == f"the search for the best split stopped early after 61 s: {says}"


def test_other_axes_keep_parameters_whole() -> None:
    found = told(2, "data", {"input:0": "shard(0)"})
    assert found.kept == () and found.parameters == found.whole
    assert found.summed > 0.9 * found.whole
