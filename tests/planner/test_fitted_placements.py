"""Placements are those of the plan: at its local samples, and as loose as its meshes allow, wherever it is ranked."""

from __future__ import annotations

import pytest

from polylane.cost.predict import predict
from polylane.plan.spec import Degrees
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.planner.ranked_plan import price_plan
from polylane.planner.stage_meshes import search_unequal_meshes
from tests.support import planning_graphs


@pytest.mark.parametrize(
    ("line", "samples"), [("tensor=2", 64), ("data=4,tensor=2,microbatches=2", 8), ("data=32,tensor=2", 2)]
)
def test_placements_are_chosen_for_the_samples_of_the_plan(line: str, samples: int) -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(2, 64), "64:a100-80g")
    partition, plan = setup.fit_plan(basis, spec_of(line), 64)
    fitted = setup.fit_to_meshes(basis, partition, plan, 64)
    assert basis.stages.sharded_graph(plan.degrees(0)).view.samples == 2
    assert fitted.stages.sharded_graph(plan.degrees(0)).view.samples == max(2, samples)


def test_without_operator_axes_nothing_is_chosen_again() -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(2, 64), "4:a100-80g")
    partition, plan = setup.fit_plan(basis, spec_of("data=2,pipeline=2"), 64)
    assert setup.fit_to_meshes(basis, partition, plan, 64) is basis


def test_unequal_meshes_are_ranked_by_the_placements_that_they_allow() -> None:
    found = planning_graphs.estimates(planning_graphs.example("gpt"), "4:a100-80g,link=pcie-3", 8)
    candidates = [c for c in search_unequal_meshes(found, 4, 80e9) if any(m != Degrees() for m in c.meshes)]
    assert candidates
    one = price_plan(found, candidates[0]).simulate()
    basis = setup.fit_to_meshes(found.basis, one.partition, one.plan)
    assert one.prediction.seconds == predict(basis, one.partition, one.plan, 8, exact=False).seconds
