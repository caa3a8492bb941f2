"""The planner tries an order of passes of the best plan's own: never slower than a named schedule, and as asked for."""

from __future__ import annotations

import pytest

from polylane.plan.fixed_keys import parse_fixed
from polylane.planner import order_trials
from polylane.planner.order_trials import try_found_orders
from polylane.planner.ranked_plan import RankedPlan, weigh
from polylane.planner.search import SearchRequest, search
from polylane.planner.stage_curves import CurveCache
from tests.support import planning_graphs, subsets

# Five blocks on four workers: no cut makes the stages equal, and no named schedule knows.
UNEVEN = planning_graphs.blocks(5, 2048)


def best_of(line: str, limit: float = 1e15, batch: int = 64) -> RankedPlan:
    fixed = parse_fixed(line)
    estimates = CurveCache(planning_graphs.basis(UNEVEN, "4:a100-80g"), batch, sync=fixed.sync)
    wish = SearchRequest((4,), 4, limit, 2, fixed=fixed)
    return try_found_orders(search(estimates, wish)).ranked_plans[0]


def weighted(found: RankedPlan) -> float:
    return weigh(found.candidate, found.prediction.seconds)


@pytest.mark.parametrize("line", subsets.one_in(2, ["pipeline=4,microbatches=4", "pipeline=4,microbatches=8"]))
def test_the_best_plan_is_no_slower_for_the_search_of_an_order(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = best_of(line)
    monkeypatch.setattr(order_trials, "MOST_PASSES", 0)
    named = best_of(line)
    assert weighted(chosen) <= weighted(named)
    assert (chosen.plan.schedule == "auto") == bool(chosen.plan.order) == (weighted(chosen) < weighted(named))


def test_an_order_is_found_where_it_is_asked_for() -> None:
    found = best_of("pipeline=4,microbatches=8,schedule=auto,chunks=1")
    assert found.plan.schedule == "auto" and found.plan.order and found.candidate.option == ("auto", 1)
    # The named schedule that it was searched beside is told.
    assert any(trial.is_simulated for trial in found.trials)
    assert best_of("data=4,schedule=auto").plan.workers == 4


def test_a_schedule_that_is_fixed_is_kept() -> None:
    assert best_of("pipeline=4,microbatches=8,schedule=zb-h1").plan.schedule == "zb-h1"
    assert best_of("pipeline=4,microbatches=8,schedule=auto,chunks=2").candidate.option == ("auto", 2)


def test_an_order_keeps_within_the_memory() -> None:
    lean = best_of("pipeline=4,microbatches=8,schedule=1f1b")
    limit = lean.peak_bytes * 1.05
    found = best_of("pipeline=4,microbatches=8", limit=limit)
    assert found.peak_bytes <= limit
