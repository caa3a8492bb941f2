"""What inspect says of a plan is so: bytes as they are sent, what ranks hold, and the step that the times allow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane import Mean
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.cost.stage_cost import PassCosts
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.inspection.plan_report import (
    count_stage_traffic,
    dtypes_of,
    price_stages,
    report_plan,
    schedule_by_rank,
    step_at_best,
)
from polylane.observe.timeline import Timeline
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import parse
from polylane.profiling.time_operators import nominal_seconds
from polylane.runtime.job import Job
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.action import ActionKind
from tests.support import subsets
from tests.support.synthetic_graphs import chain, node_seconds
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd


def prepared_for(model: nn.Module, plan: str | Plan, batch: Any, loss: Any = classify) -> CompiledTraining:
    return compile_training(model, build_objectives(loss, sgd, None), batch, plan, seconds=by_work)


def reported(
    prepared: CompiledTraining, batch: int, seconds: Sequence[tuple[float, float]] | None = None
) -> dict[str, Any]:
    """The report of a plan for batches of so many samples, by nominal times of the operators."""
    each = nominal_seconds(prepared.main_partition.graph) if seconds is None else seconds
    return report_plan(prepared, price_stages(prepared, each, batch), each, batch)


def by_work(graph: Graph, *_: Any) -> tuple[float, ...]:
    return node_seconds(graph)


def plan_of(described: Sequence[tuple[list[str], dict[str, int]]], **more: Any) -> Plan:
    """Stages of (nodes, mesh), on devices in that order."""
    ends = [0, *itertools.accumulate(prod(mesh.values()) for _, mesh in described)]
    stages = [
        {"nodes": nodes, "devices": list(range(a, b)), "mesh": mesh}
        for (nodes, mesh), (a, b) in zip(described, itertools.pairwise(ends), strict=True)
    ]
    return Plan.model_validate({"stages": stages, **more})


# Bytes from stage to stage -------------------------------------------------------------------------------------------


class Early(nn.Module):
    """A mean over samples that is made early and read at the end, beside rows of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).relu()
        early = hidden.square().mean()
        return self.third(self.second(hidden).relu()), early


def with_early(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
    out, early = model(batch[0])
    count = torch.ones_like(batch[1]).sum()
    return Mean(F.cross_entropy(out, batch[1], reduction="sum") + early * count, count)


def really_sent(prepared: CompiledTraining, batch: Any) -> dict[tuple[int, int, bool], int]:
    """Bytes of a step by (from, to, gradient), as the workers count what they send."""

    def work(_: Any) -> Timeline:
        with Job(prepared, World.join(), example=batch) as job:
            return job.step(batch).timeline

    plan, sent = prepared.plan, Counter[tuple[int, int, bool]]()
    for span in fork_workers(work, plan.workers)[0].spans:
        if span.action.kind is ActionKind.SEND:
            assert span.action.peer is not None
            sent[span.action.stage, plan.stage_and_replica(span.action.peer)[0], span.action.gradient] += span.bytes
    return {key: count for key, count in sent.items() if count}


@pytest.mark.parametrize(
    ("line", "samples"),
    subsets.one_in(
        3,
        [
            ("pipeline=2,tensor=2", 8),
            ("data=2,pipeline=2,microbatches=1", 5),
            ("data=3,pipeline=2,microbatches=1", 2),  # fewer samples than replicas
            ("[data=4 | 1],microbatches=1", 8),
            ("[data=3 | 1],microbatches=1", 2),
            ("[1 | tensor=2 | 1],microbatches=2", 8),
            ("[data=2 | tensor=2],microbatches=1", 5),
        ],
        several=True,
    ),
)
def test_bytes_are_those_that_are_sent(line: str, samples: int) -> None:
    batch = batch_of(samples)
    prepared = prepared_for(mlp(6, 8, 12, 8, 4), line, batch_of(max(samples, 6)))
    assert_as_sent(prepared, batch, samples)


@pytest.mark.parametrize(("start", "end"), subsets.one_in(2, [(2, 1), (1, 2), (2, 3)], several=True))
def test_bytes_of_a_mean_over_samples(start: int, end: int) -> None:
    """Every replica sends its mean to every rank of the other stage."""
    batch = batch_of(6)
    plan = plan_of([(["first", "mean"], {"data": start}), (["second", "loss"], {"data": end})])
    prepared = prepared_for(Early().double(), plan, batch, with_early)
    assert [
        crossing.bytes for crossing in prepared.main_partition.crossings if not crossing.value.startswith("relu")
    ] == [8]
    assert count_stage_traffic(prepared, 6, {})[0]["bytes"] == 8 * (6 * 6 + start * end)
    assert_as_sent(prepared, batch, 6)


def assert_as_sent(prepared: CompiledTraining, batch: Any, samples: int) -> None:
    microbatches = prepared.plan.microbatches
    assert samples % microbatches == 0
    told: dict[tuple[int, int, bool], int] = {}
    for edge in count_stage_traffic(prepared, samples // microbatches, dtypes_of(prepared)):
        told[edge["from"], edge["to"], False] = edge["bytes"] * microbatches
        told[edge["to"], edge["from"], True] = edge["back"] * microbatches
    assert {key: count for key, count in told.items() if count} == really_sent(prepared, batch)


def test_bytes_of_a_value_under_autocast() -> None:
    """Each of two tensor ranks has the whole of what crosses and sends it; half a float32 in 16 bits."""
    model, batch = mlp(6, 8, 12, 8, 4).float(), (torch.randn(8, 6), batch_of(8)[1])
    sizes = {}
    for precision in ("float32", "bfloat16", "float16"):
        prepared = prepared_for(model, f"pipeline=2,precision={precision},microbatches=2", batch)
        (edge,) = count_stage_traffic(prepared, 4, dtypes_of(prepared))
        sizes[precision] = edge["bytes"]
    assert sizes["float32"] == 2 * sizes["bfloat16"] == 2 * sizes["float16"]


def test_bytes_between_many_workers() -> None:
    """Of equal meshes: replicas have 3 samples, or 2, or compute on the first one for want of any."""
    for samples, rows in ((11, 11), (2, 4)):
        prepared = prepared_for(mlp(6, 8, 12, 8, 4), "data=4,pipeline=2,microbatches=1", batch_of(12))
        (edge,) = count_stage_traffic(prepared, samples, {})
        assert edge["bytes"] == edge["back"] == rows * row_bytes(prepared)
    prepared = prepared_for(mlp(6, 8, 12, 8, 4), "[data=64 | data=48],microbatches=1", batch_of(64))
    (edge,) = count_stage_traffic(prepared, 960, {})
    assert edge["bytes"] == edge["back"] == 960 * row_bytes(prepared)


def row_bytes(prepared: CompiledTraining) -> int:
    """Of one sample of what crosses."""
    (crossing,) = prepared.main_partition.crossings
    return crossing.bytes // prepared.main_partition.graph.samples


# What ranks hold -----------------------------------------------------------------------------------------------------

PINS = {"2.weight": "shard(0)", "4.weight": "shard(1)", "4.bias": "replicate"}


def test_activations_are_held_as_they_are_placed() -> None:
    """Of two layers side by side the values between are sharded, what comes out is whole on each rank."""
    plan = plan_of([(["0", "1"], {}), (["2", "loss"], {"tensor": 4})], microbatches=2, schedule="afab")
    pinned = plan.stages[1].model_copy(update={"placements": {name: {"tensor": way} for name, way in PINS.items()}})
    plan = plan.model_copy(update={"stages": (plan.stages[0], pinned)})
    first, second = reported(prepared_for(mlp(6, 8, 10, 4), plan, batch_of(12)), 12)["stages"]
    assert [stage["live"] for stage in (first, second)] == [2, 2]
    assert first["parameter_bytes"] == first["gradient_bytes"] == 8 * (6 * 8 + 8)
    assert first["held"] == 2 * 8 * 6 * 8  # what tanh gives, of float64, is kept and sent
    hidden = 3  # the most that one of 4 ranks has of 10
    assert second["parameter_bytes"] == 8 * (8 * hidden + hidden + hidden * 4 + 4)
    # What came, what the second tanh gives, log-softmax; and little more for the loss, of six labels and their count.
    assert 0 <= second["held"] - 2 * 8 * 6 * (8 + hidden + 4) <= 2 * 8 * (2 * 6 + 4)


@pytest.mark.parametrize("line", ["tensor=3", "[1 | tensor=2 | data=2]", "sequence=2,tensor=2", "data=2,pipeline=2"])
def test_parameters_are_those_that_a_rank_has(line: str) -> None:
    model = mlp(6, 8, 12, 8, 5)
    prepared = prepared_for(model, line, batch_of(8, classes=5))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for stage, told in enumerate(reported(prepared, 8)["stages"]):
        names = prepared.main_partition.parameters(stage)
        most = 0
        for rank in prepared.plan.stages[stage].devices:
            cuts = ShardSpec(prepared, rank).local_shards(parameters)
            most = max(most, sum((cuts.get(name, parameters[name])).nbytes for name in names))
        assert told["parameter_bytes"] == told["gradient_bytes"] == most


def test_frozen_parameters_have_no_gradients() -> None:
    model = mlp(6, 8, 4)
    next(model.parameters()).requires_grad_(False)
    (told,) = reported(prepared_for(model, "data=1", batch_of(8)), 8)["stages"]
    assert told["parameter_bytes"] - told["gradient_bytes"] == 8 * 6 * 8


# The step at best ----------------------------------------------------------------------------------------------------


def at_best(line: str, costs: Sequence[float]) -> Timeline:
    """A chain of one stage for each cost, a third of it forward, divided evenly over the ranks of the stage."""
    partition, spec = Partition(chain(len(costs)), tuple(range(1, len(costs)))), parse(line)
    plan = plan_from_partition(partition, spec, spec.microbatches or 1)
    each = [cost / plan.degrees(stage).workers for stage, cost in enumerate(costs)]
    return schedule_by_rank(partition, plan, [PassCosts(cost / 3, 2 * cost / 3, 0.0, 0.0, 0.0) for cost in each])


def test_a_lane_for_every_rank() -> None:
    timeline = at_best("[1 | data=2 | tensor=2],microbatches=3", (1, 2, 2))
    assert timeline.ranks == 5
    stages = [{span.action.stage for span in lane} for lane in timeline.lanes()]
    assert sorted(stages, key=min) == [{0}, {1}, {1}, {2}, {2}]
    assert all(len(lane) == 6 for lane in timeline.lanes())
    assert timeline.busy() == pytest.approx([3.0] * 5)


def test_the_balanced_plan_is_used_better() -> None:
    """Stages of cost 1, 2, 1 with 8 microbatches on three workers, and with the middle stage on two.

    Before, a round takes 2, as long as the middle one; after, all take 1, and two more to fill and to drain.
    """
    before = at_best("pipeline=3,microbatches=8", (1, 2, 1)).utilization()
    after = at_best("[1 | data=2 | 1],microbatches=8", (1, 2, 1)).utilization()
    assert before == pytest.approx(8 * 4 / (3 * (8 * 2 + 4 / 3))) and after == pytest.approx(8 * 4 / (4 * (8 + 2)))


WIDTH = 256


class Unit(nn.Module):
    """One unit of work."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("mesh", [{"data": 2}, {"tensor": 2}])
def test_the_balanced_plan_of_a_model_is_used_better(mesh: dict[str, int]) -> None:
    """By nominal times of its operators."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Unit() for _ in range(4))), (torch.randn(512, WIDTH), torch.randn(512, WIDTH))
    found = []
    for middle in ({}, mesh):
        plan = plan_of([(["0", "0"], {}), (["1", "2"], middle), (["3", "loss"], {})], microbatches=8)
        prepared = prepared_for(model, plan, batch, lambda m, b: F.mse_loss(m(b[0]), b[1]))
        found.append(reported(prepared, 512)["utilization"])
    before, after = found
    assert before == pytest.approx(0.62, abs=0.02) and after == pytest.approx(0.78, abs=0.03)


def test_one_utilization_and_seconds_of_a_rank() -> None:
    """What is reported is the picture's; work is in proportion to the samples that a replica has."""
    prepared = prepared_for(mlp(6, 8, 12, 8, 4), "[1 | data=2 | tensor=2],microbatches=2", batch_of(12))
    seconds = [(1e-3, 2e-3)] * len(prepared.main_partition.graph.nodes)
    told = reported(prepared, 12, seconds)
    assert told["utilization"] == step_at_best(prepared, price_stages(prepared, seconds, 12)).utilization()
    for stage in told["stages"]:
        mesh = prepared.plan.degrees(stage["stage"])
        work = (
            3e-3
            * len(prepared.main_partition.nodes(stage["stage"]))
            * 6
            / mesh.data
            / prepared.main_partition.graph.samples
        )
        if mesh.tensor == 1:
            assert stage["seconds"] == pytest.approx(work)
        else:  # how much of an operator a part of it takes, the device's model says
            assert work / mesh.tensor <= stage["seconds"] <= work


@pytest.mark.parametrize("more", ["", ",data=2,replicas=round-robin"])
def test_a_pipeline_that_is_never_emptied_is_as_fast_as_its_slowest_stage(more: str) -> None:
    """The drawn run fills and drains: over ever more microbatches its utilization rises to what is told."""
    drawn = []
    for microbatches in (6, 12, 36):
        plan = f"pipeline=3,schedule=pipedream,microbatches={microbatches}{more}"
        prepared = prepared_for(mlp(6, 8, 12, 8, 4), plan, batch_of(36))
        seconds = [(1e-3, 2e-3)] * len(prepared.main_partition.graph.nodes)
        drawn.append(step_at_best(prepared, price_stages(prepared, seconds, 36)).utilization())
        told = reported(prepared, 36, seconds)["utilization"]
        assert drawn[-1] < told <= 1
    assert drawn == sorted(drawn) and drawn[-1] > 0.85 * told
