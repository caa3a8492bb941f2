"""Replicas share out what they must, and no more: chosen by the search, within what the user has fixed."""

from __future__ import annotations

import itertools

import pytest

from polylane.cost.predict import predict
from polylane.plan.fixed_keys import FixedKeys, parse_fixed
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.stage_curves import CurveCache
from tests.support import planning_graphs, subsets

GRAPH = planning_graphs.blocks(4, 2048)
KINDS = ("none", "optimizer", "gradients", "parameters")


def answered(
    fixed: FixedKeys, limit: float, batch: int = 64, cluster: str = "8:a100-80g", workers: int = 8
) -> SearchResult:
    estimates = CurveCache(planning_graphs.basis(GRAPH, cluster), batch, sync=fixed.sync)
    return search(estimates, SearchRequest((workers,), 8, limit, 3, shardings=fixed.shardings, fixed=fixed))


def needed(kind: str) -> float:
    """Bytes of a worker of eight replicas that share this out."""
    basis = planning_graphs.basis(GRAPH, "8:a100-80g")
    fitted = setup.fit_plan(basis, spec_of(f"data=8,shard={kind}"), 8)
    return max(stage.memory.total for stage in predict(basis, *fitted, 8).stages)


def test_each_kind_is_chosen_where_those_that_share_out_less_do_not_fit() -> None:
    fixed, found = parse_fixed("data=8"), list[str]()
    sizes = [needed(kind) for kind in KINDS]
    assert sizes == sorted(sizes, reverse=True)
    # Half way to what the kind before needs, for estimates of memory are bounds.
    for limit in (1.2 * sizes[0], *((less + more) / 2 for more, less in itertools.pairwise(sizes))):
        best = answered(fixed, limit, batch=8).ranked_plans[0]
        found.append(best.plan.sync.shard)
        assert max(stage.memory.total for stage in best.prediction.stages) <= limit
    assert found[1:] == list(KINDS[1:]) and found[0] in ("none", "optimizer")


def test_a_plan_that_fits_only_in_parts_is_found_unasked() -> None:
    fixed, limit = parse_fixed("pipeline=1,tensor=1,sequence=1"), 1.1 * needed("parameters")
    assert answered(fixed, limit).ranked_plans[0].plan.sync.shard != "none"
    assert not answered(parse_fixed("pipeline=1,tensor=1,sequence=1,shard=none"), limit).ranked_plans


@pytest.mark.parametrize(
    "line", subsets.one_in(2, ["shard=parameters", "shard=none", "data=2", "data=4,microbatches=2", "every=8"])
)
def test_what_the_user_fixes_is_kept(line: str) -> None:
    fixed = parse_fixed(line)
    answer = answered(fixed, 80e9)
    assert answer.ranked_plans
    for each in answer.ranked_plans:
        assert fixed.allows(each.plan.meshes, each.plan.microbatches)
        if each.plan.data > 1:
            for key in fixed.sync_keys:
                assert getattr(each.plan.sync, key) == getattr(fixed.sync, key)


def test_what_changes_the_numbers_is_not_chosen_however_slow_the_network() -> None:
    answer = answered(FixedKeys(), 80e9, 64, "2x1:a100-80g,hosts=ethernet-10g", workers=2)
    assert answer.ranked_plans and all(each.plan.sync.is_exact for each in answer.ranked_plans)


@pytest.mark.parametrize(
    "line", ["every=8", "wire=bfloat16", "compress=powersgd:4:0", "compress=top_k:0.01", "servers=2"]
)
def test_a_synchronization_that_is_asked_for_is_searched_and_predicted(line: str) -> None:
    answer = answered(parse_fixed(f"data=8,{line}"), 80e9, 4096, "8:a100-80g,link=pcie-3")
    best = answer.ranked_plans[0]
    assert line.split("=")[0] in best.plan.spec
    # Replicas that servers answer one by one begin their steps one by one: their messages hide behind others' passes.
    least = 0.5 if line.startswith("servers") else 0.65
    assert least * best.candidate.seconds <= best.prediction.seconds <= 1.35 * best.candidate.seconds


def test_of_equally_fast_plans_the_one_that_shares_nothing_out_comes_first() -> None:
    """A step that computes for long: what an optimizer's smaller share saves is less than a percent."""
    best = answered(parse_fixed("data=8"), 80e9, 1 << 14).ranked_plans[0]
    assert best.plan.sync.shard == "none"
