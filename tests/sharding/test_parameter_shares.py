"""No rank of tensor=4 holds more than 30% of the parameters, and what stays whole is told with its reason."""

from __future__ import annotations

import math

import pytest

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.graph.capture.capture import capture
from polylane.placement.enumerate_strategies import enumerate_strategies
from polylane.placement.operator_view import view_operators
from polylane.placement.placement import Replicate, local_shape
from polylane.sharding.cost_model import CostSetting
from polylane.sharding.explain import explain, format_explanation
from polylane.sharding.layout import choose_layout
from tests.support.models import example_case

GPT = {"layers": "6", "hidden": "64", "heads": "8", "seq_len": "32", "vocab": "128"}


@pytest.mark.parametrize(("name", "settings"), [("gpt", GPT), ("digits", {"width": "16", "blocks": "2"})])
def test_no_rank_holds_much_more_than_its_share(name: str, settings: dict[str, str]) -> None:
    case = example_case(name, **settings)
    graph = capture(case.model(), case.loss, case.batch(4, 0))
    layout = choose_layout(graph, {"tensor": 4}, 4)
    split, shown = layout.splits["tensor"], view_operators(graph, 4, 4)
    parameters = {key: s for key, s in shown.sources.items() if s.role[0] == "parameter"}
    whole = sum(math.prod(s.value.shape) for s in parameters.values())
    for rank in range(4):
        held = sum(
            math.prod(local_shape(s.value.shape, split.source_placements[key], rank)) for key, s in parameters.items()
        )
        assert held <= 0.3 * whole, (rank, held / whole)
    told = explain(CostSetting(shown, 4, RankSpeed(), {}), split, enumerate_strategies(shown, 4), purpose="tensor")
    kept = {
        key[0].removeprefix("parameter:") for key in parameters if isinstance(split.source_placements[key], Replicate)
    }
    assert bool(kept) == bool(told.kept)
    assert all(each.reason for each in told.kept)
    assert sum(line.startswith("whole on every rank") for line in format_explanation(told)) == len(told.kept)
