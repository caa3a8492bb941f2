"""What a search computes, in calls of its dear functions: they grow again only where somebody means it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from polylane.cost import plan_cost, stage_cost, weight_halves
from polylane.cost.cost_table import ShardedGraphCost
from polylane.cost.memory import recompute_choice
from polylane.cost.memory.live_ranges import LiveRanges
from polylane.cost.predict import CostModel
from polylane.graph import sparse_gradients
from polylane.planner import ranked_plan
from polylane.planner.balance import BalancedCuts
from polylane.planner.recompute_search import search_with_recomputation
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.stage_curves import CurveCache
from tests.support import planning_graphs

BATCH = 256
# The most calls that a search of `find` makes; measured, and a tenth more. Where a search has to do more than it did,
# for what it finds is better, these numbers are raised.
MOST_CALLS = {
    "tables": 93,
    "traces": 34,
    "memory of a microbatch": 830,
    "live ranges": 46,
    "programs": 84,
    "peaks of workers": 145,
    "simulations": 19,
    "rounds of balancing": 240,
    "dropped regions": 21,
    "weight calls": 14,
}


def find(blocks: int) -> SearchResult:
    """Search plans that recompute, of attention written out: the memory of a device keeps faster ones out."""
    basis = planning_graphs.basis(planning_graphs.attending(blocks, 256, 256), "2x4:a100-80g")
    wish = SearchRequest((8, 4), 4, 1.2e9)

    def once(prices: CostModel) -> SearchResult:
        return search(CurveCache(prices, BATCH), wish)

    return search_with_recomputation(basis, once)


def count_calls(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Counter[str]:
    """Return how often some work calls the functions that searches take their time in."""
    counts = Counter[str]()

    def watch(owner: Any, function: str, name: str) -> None:
        real = getattr(owner, function)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, function, counted)

    watch(ShardedGraphCost, "table", "tables")
    watch(stage_cost, "saved_on_rank", "traces")
    watch(stage_cost, "trace_saved_tensors", "traces")
    watch(LiveRanges, "__init__", "live ranges")
    watch(LiveRanges, "microbatch_memory", "memory of a microbatch")
    watch(plan_cost, "lower_groups", "programs")
    watch(plan_cost.PlanCost, "_group_peak", "peaks of workers")
    watch(ranked_plan, "predict_step", "simulations")
    watch(BalancedCuts, "_add_stages", "rounds of balancing")
    watch(recompute_choice, "drop_regions", "dropped regions")
    watch(weight_halves, "find_graph_weight_calls", "weight calls")
    work()
    return counts


def test_a_search_calls_what_is_dear_no_more_often_than_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_calls(monkeypatch, lambda: find(3))
    assert counts.keys() == MOST_CALLS.keys(), "what is watched is called"
    assert {name: count for name, count in counts.items() if count > MOST_CALLS[name]} == {}


def test_facts_of_a_graph_are_found_once() -> None:
    graph = planning_graphs.attending(2, 64, 16)
    assert sparse_gradients.find_sparse_gradients(graph) is sparse_gradients.find_sparse_gradients(graph)
