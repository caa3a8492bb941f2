"""Orders that are found for a plan: never later than a named schedule by the simulation, and within the memory."""

from __future__ import annotations

import pytest

from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.plan.order import parse_order
from polylane.plan.spec import parse
from polylane.planner.find_order import find_measured_order, find_order
from polylane.planner.problem import fit_plan
from polylane.schedule.action import ActionKind
from polylane.schedule.live import peak_live
from tests.support import planning_graphs, subsets

EFFORT = 60_000  # a tenth of what a user's search plays: these laws hold however far it gets
NAMED = ("naive", "afab", "1f1b", "zb-h1", "zb-h2")


@pytest.mark.parametrize("microbatches", subsets.one_in(2, [4, 8]))
def test_it_is_never_later_than_a_named_schedule(microbatches: int) -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:a100-80g")
    line = f"pipeline=4,microbatches={microbatches}"
    named = {name: predict(basis, *fit_plan(basis, parse(f"{line},schedule={name}"), 64), 64).seconds for name in NAMED}
    partition, plan = fit_plan(basis, parse(f"{line},schedule=auto"), 64)
    found = find_order(basis, partition, plan, 64)
    assert predict(basis, partition, found, 64).seconds <= min(named.values()) * (1 + 1e-12)
    assert find_order(basis, partition, found, 64) is found, "an order that is there is kept"


def test_where_halving_costs_time_some_passes_stay_whole() -> None:
    """On CPUs: earlier than every schedule of one kind, with both kinds of pass."""
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:cpu,link=nvlink-3")
    line = "pipeline=4,microbatches=8"
    named = {name: predict(basis, *fit_plan(basis, parse(f"{line},schedule={name}"), 64), 64).seconds for name in NAMED}
    found = find_order(basis, *fit_plan(basis, parse(f"{line},schedule=auto"), 64), 64)
    assert predict(basis, fit_plan(basis, parse(line), 64)[0], found, 64).seconds < min(named.values())
    kinds = {action.kind for lane in parse_order(found.order) for action in lane}
    assert {ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT} < kinds


def test_it_keeps_within_the_memory() -> None:
    basis = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:a100-80g")
    partition, plan = fit_plan(basis, parse("pipeline=4,microbatches=8,schedule=auto"), 4096)
    whole = predict(basis, *fit_plan(basis, parse("pipeline=4,microbatches=8"), 4096), 4096)
    bound = max(stage.memory.total for stage in whole.stages)
    found = find_order(basis, partition, plan, 4096, memory=bound, effort=EFFORT)
    assert max(stage.memory.total for stage in predict(basis, partition, found, 4096).stages) <= bound
    with pytest.raises(PolylaneError, match=r"no order of passes fits .* the least would take .* GiB more"):
        find_order(basis, partition, plan, 4096, memory=bound / 100, effort=EFFORT)


def test_measured_times_alone_keep_to_the_memory_of_1f1b() -> None:
    graph = planning_graphs.blocks(8, 256)
    basis = planning_graphs.basis(graph, "4:a100-80g")
    partition, plan = fit_plan(basis, parse("pipeline=4,microbatches=8,schedule=auto"), 64)
    found = find_measured_order(partition, plan, [(1.0, 2.0)] * len(graph.nodes))
    assert max(peak_live(parse_order(found.order))) <= 4


def test_two_stages_of_each_worker_are_tried_as_a_v() -> None:
    """The last stage has more to do: as a V the worker with the first one has it, which is earlier."""
    graph = planning_graphs.blocks(8, 256)
    basis = planning_graphs.basis(graph, "2:a100-80g")
    partition, plan = fit_plan(basis, parse("pipeline=2,chunks=2,microbatches=8,schedule=auto"), 64)
    stages = [partition.stage_of[node.name] for node in graph.nodes]
    seconds = [((1.0, 1.3, 1.0, 1.6)[s] / stages.count(s), (2.0, 2.6, 2.0, 3.2)[s] / stages.count(s)) for s in stages]
    found = find_measured_order(partition, plan, seconds, effort=EFFORT)
    assert plan.stage_groups == (0, 1, 0, 1) and found.stage_groups == (0, 1, 1, 0)
    assert found.workers == plan.workers
    stays = find_measured_order(partition, plan, seconds, placed=True, effort=EFFORT)
    assert stays.stage_groups == plan.stage_groups and stays.order
    orders = [find_order(basis, partition, plan, 64, effort=EFFORT, placed=placed) for placed in (True, False)]
    assert predict(basis, partition, orders[1], 64).seconds <= predict(basis, partition, orders[0], 64).seconds
