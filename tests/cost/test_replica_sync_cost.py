"""What replicas pay to agree: the bytes of every way are those of theory, and so are its seconds and its memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from polylane.cluster.spec import parse
from polylane.cost.network import collectives as network
from polylane.cost.network.compressed_reduction import PASSES, STEADY, codec_seconds
from polylane.cost.network.sync_volume import TrainedTensor, compute_sync_bytes
from polylane.cost.parameter_servers import ServerCosts
from polylane.cost.plan_cost import PlanCost
from polylane.cost.predict import Prediction, predict
from polylane.cost.task_lanes import bucket_tensors
from polylane.plan.plan import Plan
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.program.lower import lower
from polylane.schedule.action import ActionKind
from tests.support import planning_graphs

GRAPH, CLUSTER = planning_graphs.blocks(4, 256), "8:a100-80g"
WEIGHTS = sum(info.bytes for info in GRAPH.parameters.values())
WAYS = (
    "shard=none",
    "wire=bfloat16",
    "wire=float16",
    "compress=powersgd:4:0",
    "compress=top_k:0.01",
    "shard=optimizer",
    "shard=gradients",
    "shard=parameters",
    "shard=gradients,within=2",
    "shard=parameters,within=2",
    "every=4",
    "every=4,outer=0.7:0.9",
)


def predicted(line: str, cluster: str = CLUSTER, batch: int = 64, every: bool = False) -> tuple[PlanCost, Prediction]:
    basis = planning_graphs.basis(GRAPH, cluster)
    partition, plan = setup.fit_plan(basis, spec_of(line), batch)
    return PlanCost(basis, partition, plan, batch), predict(basis, partition, plan, batch, every=every)


def data_bytes(found: Prediction, lane: int = 0) -> float:
    """What a lane sends in a step for replicas to agree: not what split operators or stages send each other."""
    total = 0.0
    for span in found.timeline.spans:
        if span.rank != lane:
            continue
        if span.action.kind in (ActionKind.REDUCE, ActionKind.STEP):
            total += span.bytes
        elif span.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            stage = found.plan.stage_and_replica(found.lanes[lane])[0]
            total += found.stages[stage].shard_traffic_share * span.bytes
    return total


def held(scene: PlanCost, plan: Plan) -> list[TrainedTensor]:
    partials = tuple(scene.basis.stages.partial_gradient_axes(mesh) for mesh in plan.meshes)
    program = lower(scene.partition, plan, None, partials, [0])[0]
    return [each for bucket in program.buckets for each in bucket_tensors(scene, program, bucket)]


# Where ranks of an operator axis have summands of a gradient, theory knows their common sum and not its two parts, of
# which one is sharded or waits for the last of a period's steps.
IN_PARTS = [("data=2,tensor=2", way) for way in WAYS if not way.startswith(("shard=parameters", "every"))]


@pytest.mark.parametrize(
    ("mesh", "way"),
    [*itertools.product(["data=4,microbatches=2", "data=4,pipeline=2,microbatches=2"], WAYS), *IN_PARTS],
)
def test_the_bytes_of_a_step_are_those_of_theory(mesh: str, way: str) -> None:
    """Of theory that the transport's own counters are compared with after every training."""
    scene, found = predicted(f"{mesh},{way}")
    plan = found.plan
    # The last of a period's steps is the one that sends.
    step = plan.sync.every - 1 if plan.sync.every > 1 else STEADY
    theory = compute_sync_bytes(plan.sync, held(scene, plan), step, plan.microbatches)
    assert theory > 0
    assert data_bytes(found) == pytest.approx(theory, rel=1e-4, abs=64)


@pytest.mark.parametrize("way", ["wire=bfloat16", "compress=top_k:0.01", "compress=powersgd:4:0"])
def test_a_codec_takes_its_time_where_gradients_are_complete_and_before_the_step(way: str) -> None:
    (_, plain), (scene, found) = predicted("data=4"), predicted(f"data=4,{way}")
    device = scene.basis.cluster.device(0)
    whole = codec_seconds(found.plan.sync, held(scene, found.plan), device)

    def took(one: Prediction, kind: ActionKind) -> float:
        return sum(s.end - s.start for s in one.timeline.spans if s.rank == 0 and s.action.kind is kind)

    more = [took(found, kind) - took(plain, kind) for kind in (ActionKind.BACKWARD, ActionKind.STEP)]
    before = PASSES[found.plan.sync.compress.kind if found.plan.sync.compress else "bfloat16"][1]
    assert more == pytest.approx([before * whole, (1 - before) * whole], rel=1e-6)


def test_a_measured_codec_takes_what_was_measured() -> None:
    sync, tensors = spec_of("data=2,wire=bfloat16").sync, [TrainedTensor((1000, 500), 4, 2)]
    plain = parse(CLUSTER).device(0)
    measured = plain.model_copy(update={"codecs": {"bfloat16": 1e9}})
    assert codec_seconds(sync, tensors, measured) == pytest.approx(2e6 / 1e9)
    assert codec_seconds(sync, tensors, plain) == pytest.approx(2e6 * PASSES["bfloat16"][0] / plain.stream)
    low, high = (spec_of(f"data=2,compress=powersgd:{rank}").sync for rank in (4, 64))
    assert codec_seconds(low, tensors, plain) < codec_seconds(high, tensors, plain)


def test_each_entry_that_is_sent_costs_as_much_as_many_that_are_not() -> None:
    """And those of every rank are added up; a rate is that of a hundredth of the entries, between two ranks."""
    device = parse(CLUSTER).device(0).model_copy(update={"codecs": {"top_k": 1e9}})

    def took(fraction: float, ranks: int) -> float:
        sync = spec_of(f"data=2,compress=top_k:{fraction}").sync
        return codec_seconds(sync, [TrainedTensor((1000, 500), 4, ranks)], device)

    assert took(0.01, 2) == pytest.approx(2e6 / 1e9)
    assert took(0.1, 2) / took(0.001, 2) == pytest.approx(4.5 / 1.035)
    assert took(0.01, 2) < took(0.01, 8) < 4 * took(0.01, 2)


@pytest.mark.parametrize(("way", "more"), [("every=4", 0), ("every=4,outer=0.7:0.9", 2), ("every=4,outer=0.7:0", 1)])
def test_an_outer_optimizer_keeps_an_anchor_and_its_momentum(way: str, more: int) -> None:
    (_, plain), (_, found) = predicted("data=4,every=4"), predicted(f"data=4,{way}")
    grown = found.stages[0].memory.optimizer - plain.stages[0].memory.optimizer
    assert grown == pytest.approx(more * WEIGHTS, rel=1e-6)
    assert (found.seconds > plain.seconds) == bool(more)


def test_what_was_not_sent_is_kept() -> None:
    plain, found = (predicted(f"data=4,{way}")[1].stages[0].memory for way in ("wire=bfloat16", "compress=top_k:0.1"))
    assert found.optimizer - plain.optimizer == pytest.approx(WEIGHTS, rel=1e-6)


# ---- parameter servers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "times"),
    [
        ("data=4,servers=1,dedicated=yes", 4),  # every worker its gradients; the weights come from elsewhere
        ("data=4,servers=1", 2 * 3),  # of the worker with the server nothing leaves, but the weights of the others
        ("data=4,servers=4", 2 * 3),
        ("data=4,servers=2,staleness=any", 2 * 3),
        ("data=2,tensor=2,servers=1,dedicated=yes", 2),
    ],
)
def test_servers_get_and_give_once_for_each_replica(way: str, times: float) -> None:
    _, found = predicted(way, every=True)
    total = sum(data_bytes(found, lane) for lane in range(found.plan.workers))
    assert total == pytest.approx(times * WEIGHTS, rel=0.01)  # along tensor= every rank has the small ones


def test_a_synchronous_step_ends_when_the_weights_are_there() -> None:
    scene, found = predicted("data=4,servers=1,dedicated=yes")
    costs = ServerCosts(scene)
    (load,) = costs.loads()
    travel = network.message_seconds(scene.basis.cluster, float(WEIGHTS), 0, 4)
    assert load.push == load.pull == (pytest.approx(travel),) * 4
    assert found.served is not None and found.served.apart == 0
    alone = predicted("data=1", batch=16)[1]
    passes = alone.seconds - alone.stages[0].update_seconds
    least = passes + costs.client_seconds() + 2 * travel + load.adding + load.update
    assert least <= found.seconds <= least + 6 * travel + 4 * (load.adding + load.answer)
    assert found.timeline.makespan() == pytest.approx(found.seconds, rel=0.2)
    assert found.stages[0].update_seconds == 0


def test_more_servers_share_the_work() -> None:
    one, four = (predicted(f"data=4,servers={count},dedicated=yes", "8:a100-80g,link=pcie-3")[1] for count in (1, 4))
    assert four.seconds < one.seconds


def test_a_straggler_holds_back_those_who_wait_for_it() -> None:
    seconds = {}
    for staleness in ("0", "2", "any"):
        basis = planning_graphs.basis(GRAPH, "2:a100-80g")
        slow = {1: 0.2}
        basis = replace(basis, cluster=replace(basis.cluster, speeds=slow))
        fit = setup.fit_plan(basis, spec_of(f"data=2,servers=1,staleness={staleness}"), 1 << 16)
        seconds[staleness] = predict(basis, *fit, 1 << 16).seconds
    assert seconds["any"] < 0.7 * seconds["0"]
    assert seconds["any"] < seconds["2"] <= seconds["0"] * 1.01


def test_servers_hold_the_states_that_workers_do_not() -> None:
    plain, apart, within = (
        predicted(f"data=4,{way}")[1].stages[0].memory for way in ("shard=none", "servers=1,dedicated=yes", "servers=4")
    )
    assert apart.optimizer < plain.optimizer / 10
    assert within.optimizer > apart.optimizer
