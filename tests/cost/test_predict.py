"""Predictions agree with theory where theory is exact, and do not depend on how workers that are alike are played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polylane.cluster.spec import parse
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import Prediction, predict
from polylane.cost.simulator.schedule_tasks import simulate_replicas, simulate_schedule
from polylane.errors import PolylaneError
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.schedule.round_robin import replica_lanes
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from tests.support import planning_graphs

# Of the preset: the host between two passes.
TURN = parse("1:a100-80g").device(0).turn


def predicted(
    plan: str, cluster: str = "8:a100-80g", batch: int = 64, every: bool = False, **how: object
) -> Prediction:
    found = planning_graphs.basis(planning_graphs.blocks(8, 256), cluster, TrainingOptions(**how))  # type: ignore[arg-type]
    return predict(found, *setup.fit_plan(found, spec_of(plan), batch), batch, every=every)


@pytest.mark.parametrize(
    "plan", ["data=4", "data=2,pipeline=2", "pipeline=4", "data=2,tensor=4", "data=2,pipeline=2,tensor=2"]
)
def test_one_worker_stands_for_all_that_are_like_it(plan: str) -> None:
    few, every = predicted(plan), predicted(plan, every=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.utilization == pytest.approx(every.utilization, rel=1e-9)
    assert few.timeline.ranks <= every.timeline.ranks == every.plan.workers


@pytest.mark.parametrize(
    "meshes, microbatches",
    [("data=2,pipeline=2", 8), ("data=3,pipeline=2", 8), ("[data=2 | 1]", 8), ("[data=2,tensor=2 | tensor=2]", 6)],
)
def test_replicas_in_turn_are_played_where_they_differ(meshes: str, microbatches: int) -> None:
    """A lane for one rank of those that do the same takes as long as one for each, and what theory says."""
    plan = f"{meshes},replicas=round-robin,microbatches={microbatches}"
    few, every = predicted(plan, batch=48), predicted(plan, batch=48, every=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.timeline.ranks <= every.timeline.ranks == every.plan.workers
    assert all(stage.samples == 48 // microbatches for stage in few.stages)
    made, graph = few.plan, StageGraph.chain(2)
    lanes = replica_lanes("1f1b", graph, microbatches, [mesh.data for mesh in made.meshes], (0, 1))
    passes = [stage.passes for stage in few.stages]
    theory = simulate_replicas(
        lanes,
        [p.forward + p.waits + TURN for p in passes],
        [p.backward + p.backward_waits + TURN for p in passes],
        graph,
    ).makespan()
    assert theory <= every.seconds <= 1.2 * theory


@pytest.mark.parametrize("schedule", ["naive", "afab", "1f1b"])
def test_a_pipeline_takes_what_its_schedule_takes_and_its_messages(schedule: str) -> None:
    found = predicted(f"pipeline=4,schedule={schedule},microbatches=8")
    passes = [stage.passes for stage in found.stages]
    forward, backward = [p.forward + TURN for p in passes], [p.backward + TURN for p in passes]
    theory = simulate_schedule(schedule_lanes(schedule, 4, 8), forward, backward).makespan()
    update = max(stage.update_seconds for stage in found.stages)
    messages = [s.end - s.start for s in found.timeline.spans if s.action.peer is not None]
    assert theory <= found.seconds <= theory + update + sum(messages)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_all_of_the_lanes_time_is_told_where_steps_overlap(schedule: str) -> None:
    found = predicted(f"pipeline=4,schedule={schedule},microbatches=8")
    assert found.utilization + found.moving + found.waiting + found.bubble == pytest.approx(1)
    assert found.seconds == found.timeline.makespan() - found.overlap
    assert (found.overlap > 0) == (schedule == "zb-h2")


def test_replicas_take_a_pass_the_rest_of_the_reductions_and_the_update() -> None:
    hidden, exposed = predicted("data=8"), predicted("data=8", overlap=False)
    assert hidden.seconds < exposed.seconds
    (stage,) = hidden.stages
    alone = stage.passes.forward + stage.passes.backward + stage.update_seconds + 2 * TURN
    assert alone < hidden.seconds
    reduced = sum(s.end - s.start for s in exposed.timeline.spans if str(s.action.kind) == "reduce")
    assert exposed.seconds == pytest.approx(alone + reduced, rel=1e-9)


def test_full_recomputation_trades_time_for_memory() -> None:
    kept, again = predicted("data=1", batch=4096), predicted("data=1", batch=4096, recompute="full")
    (plain,), (twice,) = kept.stages, again.stages
    assert twice.passes.backward == pytest.approx(plain.passes.backward + plain.passes.forward)
    assert twice.memory.activations < plain.memory.activations


def test_a_straggler_makes_everybody_wait() -> None:
    found = planning_graphs.basis(planning_graphs.blocks(8, 256), "4:a100-80g")
    slow = replace(found, cluster=replace(parse("4:a100-80g"), speeds={2: 0.5}))
    plan = spec_of("data=4")
    fast = predict(found, *setup.fit_plan(found, plan, 64), 64)
    late = predict(slow, *setup.fit_plan(slow, plan, 64), 64)
    assert late.seconds > 1.5 * fast.seconds


def test_workers_that_share_cores_slow_each_other() -> None:
    alone = predicted("data=1", "1:cpu,cores=1", batch=16)
    shared = predicted("data=2", "2:cpu,cores=1", batch=32)
    apart = predicted("data=2", "2:cpu,cores=2", batch=32)
    assert shared.seconds >= 1.9 * alone.seconds
    assert apart.seconds < shared.seconds


def test_memory_is_split_with_the_parameters() -> None:
    whole, half = predicted("data=1"), predicted("tensor=2")
    assert half.stages[0].memory.parameters < 0.6 * whole.stages[0].memory.parameters
    assert half.stages[0].memory.optimizer < 0.6 * whole.stages[0].memory.optimizer


def test_a_plan_s_recomputation_costs_what_runs_again_and_saves_what_is_dropped() -> None:
    none, full = predicted("data=1", batch=4096), predicted("data=1,recompute=full", batch=4096)
    (plain,), (again,) = none.stages, full.stages
    # The last operator of a block runs only once: nothing that it makes is asked for.
    assert plain.passes.backward < again.passes.backward < plain.passes.backward + plain.passes.forward
    assert again.memory.activations < plain.memory.activations
    assert predicted("data=1,recompute=budget:1GB", batch=64).stages == predicted("data=1", batch=64).stages
    with pytest.raises(PolylaneError, match="recompute: stage 0 needs a budget of"):
        predicted("data=1,recompute=budget:1KB", batch=64)
