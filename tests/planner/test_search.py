"""The search finds what brute force finds, and the classic pieces of advice come out of it by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.graph.graph import Graph
from polylane.planner import advice
from polylane.planner.balance import BalancedCuts
from polylane.planner.ranked_plan import price_plan
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan, enumerate_uniform_plans, min_step_seconds, rate_uniform_plan
from tests.support import planning_graphs, subsets

TIMES = st.lists(st.integers(1, 20), min_size=2, max_size=8)


# Estimates of the last job: another search of the same one, with another limit or bound, takes what is known.
_latest = dict[Any, tuple[Graph, CurveCache]]()


def estimates_of(graph: Graph, cluster: str, batch: int) -> CurveCache:
    key = id(graph), cluster, batch
    if key not in _latest:
        _latest.clear()
        _latest[key] = graph, planning_graphs.estimates(graph, cluster, batch)
    return _latest[key][1]


def answered(graph: Graph, cluster: str, batch: int, workers: tuple[int, ...], limit: float = 80e9) -> SearchResult:
    found = estimates_of(graph, cluster, batch)
    inner = max(group.devices for group in found.basis.cluster.hosts)
    return search(found, SearchRequest(workers, inner, limit, plan_count=3))


@given(TIMES, st.integers(1, 4))
def test_cuts_make_the_slowest_stage_as_fast_as_can_be(times: list[int], stages: int) -> None:
    sums = np.concatenate([[0.0], np.cumsum(times)])
    ends = BalancedCuts(sums, lambda last: np.zeros(len(sums))).cut_into(stages)
    inner = range(1, len(sums) - 1)
    ways = [(0, *cuts, len(sums) - 1) for cuts in itertools.combinations(inner, stages - 1)]
    if not ways:
        assert ends is None
        return
    assert ends is not None and tuple(ends) in ways
    # A power mean of the stages' times: within its own bound of the least possible maximum.
    best = min(max(np.diff(sums[list(way)])) for way in ways)
    assert max(np.diff(sums[ends])) <= best * stages ** (1 / 8) + 1e-9


@given(TIMES, st.integers(2, 3), st.data())
def test_cuts_keep_the_limit(times: list[int], stages: int, data: st.DataObject) -> None:
    sums = np.concatenate([[0.0], np.cumsum(times)])
    sizes = np.concatenate(
        [[0.0], np.cumsum(data.draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times))))]
    )
    bytes_ = [(sizes[None, :] - sizes[:, None]) * (stages - s) for s in range(stages)]
    limit = data.draw(st.integers(1, 60))
    cuts = BalancedCuts(sums, lambda last: sizes * last, limit)
    cuts.cut_into(data.draw(st.integers(1, 4)))  # asked for other numbers of stages before, it says the same
    ends = cuts.cut_into(stages)
    inner = range(1, len(sums) - 1)
    ways = [(0, *cuts, len(sums) - 1) for cuts in itertools.combinations(inner, stages - 1)]
    fitting = [w for w in ways if all(bytes_[s][w[s], w[s + 1]] <= limit for s in range(stages))]
    assert (ends is None) == (not fitting)
    assert ends is None or tuple(ends) in fitting


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.integers(1, 8), st.integers(1, 64), st.integers(1, 9))
def test_uniform_plans_use_all_workers(workers: int, inner: int, batch: int, pieces: int) -> None:
    for plan in enumerate_uniform_plans(workers, inner, batch, pieces):
        assert plan.data * plan.stages * plan.sequence * plan.tensor == workers
        assert plan.sequence * plan.tensor <= inner and plan.stages <= pieces
        assert plan.data * plan.microbatches <= batch


@pytest.mark.parametrize("limit", subsets.one_in(2, [80e9, 20e6]))
def test_nothing_that_is_passed_over_could_be_the_best(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = planning_graphs.blocks(4, 256), "8:a100-80g,link=pcie-3"
    near = answered(graph, cluster, 64, (8,), limit)
    monkeypatch.setattr("polylane.planner.search.FAR", np.inf)
    every = answered(graph, cluster, 64, (8,), limit)
    assert near.compared_count == every.compared_count and not every.skipped_count
    if limit > 1e9:
        assert near.skipped_count
    assert [found.plan.spec for found in near.ranked_plans] == [found.plan.spec for found in every.ranked_plans]
    assert near.fitting_candidates[:1] == every.fitting_candidates[:1]


def test_no_plan_takes_less_than_its_floor() -> None:
    graph, cluster = planning_graphs.blocks(4, 64), "8:a100-80g"
    found = planning_graphs.estimates(graph, cluster, 16)
    for plan in enumerate_uniform_plans(4, 4, 16, found.max_stages):
        candidate = rate_uniform_plan(found, plan, np.inf)
        assert candidate is None or min_step_seconds(found, plan) <= candidate.seconds * (1 + 1e-12)


def test_what_was_passed_over_is_looked_at_where_all_others_turn_out_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = planning_graphs.blocks(4, 256), "8:a100-80g,link=pcie-3"
    seen = list[int]()

    def exact(estimates: object, candidates: list[RatedPlan], wish: object, finalists: int, told: object) -> object:
        seen.append(len(candidates))
        return (
            ([], {id(c): c for c in candidates})
            if len(seen) == 1
            else ([price_plan(estimates, candidates[-1]).simulate()], {})
        )

    monkeypatch.setattr("polylane.planner.search._exact", exact)
    answer = answered(graph, cluster, 64, (8,))
    assert len(answer.ranked_plans) == 1 and not answer.skipped_count
    assert seen[1] > seen[0]


def test_what_is_shown_fits_when_it_is_predicted_exactly() -> None:
    graph, cluster = planning_graphs.blocks(8, 1024), "4:a100-80g"
    free = answered(graph, cluster, 64, (4,))
    sizes = sorted(max(stage.memory.total for stage in found.prediction.stages) for found in free.ranked_plans)
    bound = sizes[0] + 1  # of the best plans only the leanest is within it
    for found in answered(graph, cluster, 64, (4,), bound).ranked_plans:
        assert max(stage.memory.total for stage in found.prediction.stages) <= bound


def test_what_fits_and_has_samples_enough_is_replicated() -> None:
    best = answered(planning_graphs.blocks(8, 1024), "4:a100-80g", 4096, (4, 2, 1)).ranked_plans[0]
    assert best.plan.spec.startswith("data=4,pipeline=1,"), best.plan.spec


def test_what_does_not_fit_is_divided() -> None:
    graph = planning_graphs.blocks(8, 1024)
    weights = sum(info.bytes for info in graph.parameters.values())
    found = answered(graph, "4:a100-80g", 64, (4,), limit=2.5 * weights)
    assert found.too_large_candidates, "replicas hold all weights, gradients and states: four times the weights"
    for each in found.ranked_plans:
        assert each.plan.pipeline * each.plan.tensor > 1
        assert each.candidate.peak_bytes <= 2.5 * weights
    assert all(
        advice.describe_candidate(c).startswith("data=4,pipeline=1,micro")
        for c in found.too_large_candidates
        if len(c.meshes) == 1 and c.meshes[0].tensor == c.meshes[0].sequence == 1
    )


def test_operators_are_split_inside_hosts_and_the_rest_across() -> None:
    graph = planning_graphs.blocks(8, 4096)
    weights = sum(info.bytes for info in graph.parameters.values())
    found = answered(graph, "2x4:a100-80g,hosts=ethernet-10g", 64, (8,), limit=1.2 * weights)
    for each in found.ranked_plans:
        for stage in each.plan.stages:
            inner = each.plan.degree("tensor") * each.plan.degree("sequence")
            for at in range(0, len(stage.devices), inner):
                group = stage.devices[at : at + inner]
                assert len({rank // 4 for rank in group}) == 1, "ranks that share an operator are on one host"


def test_branches_get_stages_of_their_own_where_nothing_else_helps() -> None:
    found = answered(planning_graphs.example("inception"), "4:cpu,link=nvlink-3", 1, (4, 2, 1), limit=4e9)
    assert found.ranked_plans[0].candidate.stage_of_piece, "one sample: no replicas, no microbatches"
    assert found.ranked_plans[0].plan.pipeline > 1


def test_one_device_is_better_where_messages_cost_more_than_they_save() -> None:
    found = answered(planning_graphs.blocks(2, 16), "2x1:a100-80g,hosts=ethernet-10g", 8, (2, 1))
    assert found.ranked_plans[0].plan.workers == 1
    said = advice.advice_sentences(advice.advise(found), found.ranked_plans[0], str)
    assert any(line.startswith("One device is better than several") for line in said)


def test_where_the_host_is_what_a_step_waits_for_it_is_said() -> None:
    """Tiny operators take a GPU less time than issuing them takes the host; large ones do not."""
    for hidden, batch, bound in ((16, 8, True), (4096, 16, False)):
        graph = planning_graphs.blocks(2, hidden)
        answer = answered(graph, "2:h100-80g", batch, (1,))
        found = answer.ranked_plans[0]
        parts = {part.name: part.share for part in advice.step_shares(found.prediction)}
        assert sum(parts.values()) == pytest.approx(1.0, abs=0.05)
        assert (parts.get(advice.ISSUING, 0.0) > 0.5) == bound
        said = advice.advice_sentences(advice.advise(answer), found, str)
        assert any("the host has as many operators to issue" in line for line in said) == bound


def test_nothing_fits() -> None:
    found = answered(planning_graphs.blocks(8, 1024), "2:a100-80g", 8, (2, 1), limit=1e6)
    assert not found.ranked_plans and found.too_large_candidates


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_links_of_so_many_times_the_bandwidth(factor: float) -> None:
    cluster = planning_graphs.basis(planning_graphs.blocks(2, 16), "2x4:a100-80g").cluster
    faster = advice.with_faster_links(cluster, factor)
    assert faster.link((0, 1)).bandwidth == factor * cluster.link((0, 1)).bandwidth
    assert faster.link((0, 4)).bandwidth == factor * cluster.link((0, 4)).bandwidth
