"""The search prices recomputation and what replicas share out as predictions do."""

from __future__ import annotations

import numpy as np
import pytest

from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import predict
from polylane.graph.graph import Graph
from polylane.plan.recompute import Mode
from polylane.plan.spec import Degrees
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.planner.ranked_plan import price_plan
from polylane.planner.search import SearchRequest, search
from polylane.planner.stage_curves import StageCurves
from polylane.planner.stage_meshes import StageMeshSearch
from polylane.planner.uniform_plans import UniformPlan, enumerate_uniform_plans, min_step_seconds, rate_uniform_plan
from tests.support import planning_graphs, subsets

CLUSTER = "8:a100-80g,link=pcie-3"
WAYS = [
    *(
        (TrainingOptions(overlap=overlap), shard)
        for shard in ("optimizer", "gradients", "parameters")
        for overlap in (False, True)
    ),
    (TrainingOptions(dtype="bfloat16"), "optimizer"),
    (TrainingOptions(dtype="bfloat16", recompute="full"), "parameters"),
    (TrainingOptions(recompute="selective"), "none"),
]


def graph_for(method: TrainingOptions) -> Graph:
    return planning_graphs.attending(3, 64, 256) if method.recompute == "selective" else planning_graphs.blocks(6, 512)


@pytest.mark.parametrize("way", subsets.one_in(3, subsets.one_in(3, WAYS)), ids=str)
def test_no_plan_takes_less_than_its_floor(way: tuple[TrainingOptions, str]) -> None:
    graph = graph_for(way[0])
    found = planning_graphs.estimates(graph, CLUSTER, 16, *way)
    for plan in enumerate_uniform_plans(4, 4, 16, found.max_stages):
        candidate = rate_uniform_plan(found, plan, np.inf)
        assert candidate is None or min_step_seconds(found, plan) <= candidate.seconds * (1 + 1e-12)


@pytest.mark.parametrize(("way", "degrees"), subsets.pairs(WAYS, [(8, 1), (4, 2), (1, 4)]))
def test_estimates_are_near_predictions(way: tuple[TrainingOptions, str], degrees: tuple[int, int]) -> None:
    data, stages = degrees
    graph = graph_for(way[0])
    found = planning_graphs.estimates(graph, CLUSTER, 64, *way)
    candidate = rate_uniform_plan(found, UniformPlan(data, stages, 1, 1, 4), np.inf)
    assert candidate is not None
    exact = price_plan(found, candidate).simulate().prediction
    assert candidate.seconds == pytest.approx(exact.seconds, rel=0.1), (candidate.seconds, exact.seconds)


def test_ways_to_share_are_ranked_as_they_are_predicted() -> None:
    graph, seconds = planning_graphs.blocks(6, 512), list[tuple[float, float]]()
    for shard in ("none", "optimizer", "gradients", "parameters"):
        found = planning_graphs.estimates(graph, CLUSTER, 64, shard=shard)
        candidate = rate_uniform_plan(found, UniformPlan(8, 1, 1, 1, 2), np.inf)
        basis = planning_graphs.basis(graph, CLUSTER)
        exact = predict(basis, *setup.fit_plan(basis, spec_of(f"data=8,microbatches=2,shard={shard}"), 64), 64)
        assert candidate is not None
        seconds.append((candidate.seconds, exact.seconds))
    estimates, exacts = np.array(seconds).T
    assert list(np.argsort(estimates, kind="stable")) == list(np.argsort(exacts, kind="stable"))


def curves(graph: Graph, how: Mode) -> StageCurves:
    return planning_graphs.estimates(graph, CLUSTER, 32, TrainingOptions(recompute=how)).curves(Degrees(), 4, (0,))


def test_selective_recomputation_holds_less_and_goes_back_slower() -> None:
    graph = planning_graphs.attending(3, 64, 512)
    none, selective, full = (curves(graph, how) for how in ("none", "selective", "full"))
    assert none.backward[-1] < selective.backward[-1] < full.backward[-1]
    assert none.activation_bytes[-1] > selective.activation_bytes[-1] > full.activation_bytes[-1]
    assert (none.forward == selective.forward).all()
    assert (np.diff(selective.activation_bytes) >= 0).all() and (np.diff(selective.backward) >= 0).all()
    none, selective = (curves(planning_graphs.blocks(3, 64), how) for how in ("none", "selective"))
    assert (none.backward == selective.backward).all() and (none.activation_bytes == selective.activation_bytes).all()


def test_a_stage_takes_no_less_than_what_travels_beside_it() -> None:
    found = planning_graphs.estimates(planning_graphs.blocks(6, 512), CLUSTER, 8, shard="parameters")
    curves = found.curves(Degrees(8), 1, range(8))
    ends = np.arange(len(found.positions))
    times = curves.stage_seconds(ends[:-1], ends[1:])
    forward, backward = times.forward, times.backward
    assert (forward >= np.diff(curves.gather_seconds)).all()
    assert (backward >= np.diff(curves.gather_seconds + curves.scatter_seconds)).all()
    assert (forward >= np.diff(curves.forward) + curves.host_overhead).all()
    apart = found.curves(Degrees(8), 1, range(0, 16, 2)[:4])
    assert apart.gather_seconds[-1] != curves.gather_seconds[-1], "other ranks, other links"
    alone = found.curves(Degrees(1), 1, range(1))
    assert not alone.gather_seconds.any() and not alone.scatter_seconds.any()


@pytest.mark.parametrize("shard", subsets.one_in(3, ["none", "optimizer", "parameters"], first=2))
def test_unequal_stages_follow_the_same_law(shard: str) -> None:
    graph = planning_graphs.blocks(3, 512)
    look = StageMeshSearch(planning_graphs.estimates(graph, CLUSTER, 32, shard=shard), 8, 4, 1e12)
    plain = StageMeshSearch(planning_graphs.estimates(graph, CLUSTER, 32), 8, 4, 1e12)
    for own, other in zip(look.options, plain.options, strict=True):
        if own.mesh.data == 1 or shard == "none":
            assert (own.closing_seconds == other.closing_seconds).all() and (own.seconds == other.seconds).all()
        elif shard == "optimizer":
            assert (own.seconds == other.seconds).all() and own.closing_seconds[0, -1] != other.closing_seconds[0, -1]
        else:
            assert (
                own.seconds[0, -1] > other.seconds[0, -1] and own.closing_seconds[0, -1] < other.closing_seconds[0, -1]
            )


@pytest.mark.parametrize(
    "way",
    subsets.one_in(2, [(TrainingOptions(), "parameters"), (TrainingOptions(recompute="selective"), "none")]),
    ids=str,
)
def test_a_search_finds_plans_that_run_so(way: tuple[TrainingOptions, str]) -> None:
    graph = graph_for(way[0])
    found = planning_graphs.estimates(graph, CLUSTER, 32, *way)
    answer = search(found, SearchRequest((4, 2), 4, 80e9, plan_count=3))
    assert answer.ranked_plans
    for each in answer.ranked_plans:
        assert each.plan.sync.shard == (way[1] if each.plan.data > 1 else "none")
        assert each.prediction.seconds > 0


def test_what_does_not_fit_whole_fits_in_parts() -> None:
    graph = planning_graphs.blocks(8, 1024)
    weights = sum(info.bytes for info in graph.parameters.values())
    fits = {}
    for shard in ("none", "parameters"):
        found = planning_graphs.estimates(graph, CLUSTER, 64, shard=shard)
        limit = found.footprint.margin.fixed_bytes + 2.5 * weights
        candidate = rate_uniform_plan(found, UniformPlan(8, 1, 1, 1, 1), limit)
        assert candidate is not None
        fits[shard] = candidate.fits
    assert fits == {"none": False, "parameters": True}
