"""Plans that recompute are found where memory asks for it, fill what memory there is, and are priced as they run."""

from __future__ import annotations

import pytest

from polylane.cost.predict import CostModel, predict
from polylane.plan.recompute import BUDGET, NONE
from polylane.planner.recompute_search import search_with_recomputation
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.stage_curves import CurveCache
from tests.support import planning_graphs

BATCH = 8192


def found(limit: float, fixed: str | None = None) -> SearchResult:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "1:a100-80g")
    wish = SearchRequest((1,), 1, limit)

    def once(prices: CostModel) -> SearchResult:
        return search(CurveCache(prices, BATCH), wish)

    return search_with_recomputation(basis, once, fixed)


def peak(answer: SearchResult) -> int:
    return answer.ranked_plans[0].peak_bytes


def test_nothing_is_recomputed_where_all_fits() -> None:
    answer = found(1e15)
    assert {each.plan.recompute for each in answer.ranked_plans} == {NONE}


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_what_does_not_fit_is_recomputed_as_little_as_needed(share: float) -> None:
    whole = found(1e15)
    limit = share * peak(whole)
    answer = found(limit)
    best = answer.ranked_plans[0]
    assert best.peak_bytes <= limit
    # The prediction is that of the plan which is written, with what the runtime recomputes.
    again = predict(
        planning_graphs.basis(planning_graphs.blocks(8, 256), "1:a100-80g"), best.partition, best.plan, BATCH
    )
    assert again.seconds == pytest.approx(best.prediction.seconds, rel=1e-9)
    assert best.prediction.seconds >= whole.ranked_plans[0].prediction.seconds
    if best.plan.recompute.startswith(BUDGET):
        assert best.peak_bytes > 0.5 * limit, "a budget fills the memory that is there"


def test_a_mode_that_is_asked_for_is_kept() -> None:
    answer = found(1e15, fixed=NONE)
    assert {each.plan.recompute for each in answer.ranked_plans} == {NONE}


def test_what_is_said_not_to_fit_does_not_fit_in_the_smallest_microbatches_either() -> None:
    """The search estimates less than the runtime keeps: finalists may turn out too large."""
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "1:a100-80g")
    best = found(1e15, fixed="full").ranked_plans[0]
    smallest = best.plan.model_copy(update={"microbatches": BATCH // 16})
    peak_bytes = max(stage.memory.total for stage in predict(basis, best.partition, smallest, BATCH).stages)
    for share in (1.02, 1.1, 1.3):
        answer = found(share * peak_bytes, fixed="full")
        assert answer.ranked_plans, f"a plan needs {peak_bytes:,} bytes, and nothing fits into {share} of that"
        assert peak(answer) <= share * peak_bytes
