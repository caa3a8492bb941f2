"""The promise for stages that branch and meet: on devices of their own, at the same time, some of them split again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.plan_file import load
from polylane.runtime.job import Job
from polylane.schedule.stage_graph import StageGraph
from tests.equivalence import table
from tests.equivalence.test_equivalence import adamw, case_of, compile_case, sgd, verdict_on
from tests.equivalence.test_hybrids import assert_cut
from tests.support import subsets
from tests.support.workers.training import assert_state, batch_of, workers

PLANS = Path(__file__).parent.parent.parent / "examples" / "plans"

BRANCHES_IN_PIPELINE = ((), (0,), (0,), (0,), (0,), (1, 2, 3, 4))
PIPELINE_IN_BRANCHES = ((), (0,), (1,), (0,), (0,), (0, 2, 3, 4))


def stages(*described: tuple[list[str], dict[str, int]]) -> Plan:
    """A plan of stages as (nodes, mesh), on devices in that order."""
    found: list[dict[str, Any]] = []
    for nodes, mesh in described:
        first = sum(len(stage["devices"]) for stage in found)
        workers = mesh.get("data", 1) * mesh.get("sequence", 1) * mesh.get("tensor", 1)
        found.append({"nodes": nodes, "devices": list(range(first, first + workers)), "mesh": mesh})
    return Plan.model_validate({"stages": found, "schedule": "1f1b", "microbatches": 2})


TOWERS = stages(
    (["query", "div"], {"data": 2}),
    (["document", "numpy_T"], {"tensor": 2}),
    (["matmul", "loss"], {}),
).model_copy(update={"microbatches": 1})

# The skip of the outer level goes straight from the first stage to the last, past the middle.
UNET = stages(
    (["down.0", "max_pool2d"], {}),
    (["down.1", "bottom"], {"data": 2}),
    (["widen.0", "up.0"], {"tensor": 2}),
    (["widen.1", "loss/to"], {}),
)


# While the encoder reads the text, the decoder's first layer goes through what has been said so far. All use the same
# embedding.
ENCODER_DECODER = stages(
    (["encoder", "encoder"], {"data": 2}),
    (["new_zeros", "decoder.block.0.layer.0"], {"sequence": 2}),
    (["decoder.block.0.layer.1", "mul#2"], {"tensor": 2}),
)


def prepared_for(model: str, plan: Plan, optimizer: Any, samples: int) -> CompiledTraining:
    return compile_case(model, Objective("loss", case_of(model).loss, optimizer), plan, samples)


CASES: dict[str, tuple[str, str | Plan, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "branches_in_pipeline": ("inception", "branches_in_pipeline", BRANCHES_IN_PIPELINE, (8, 5)),
    "pipeline_in_branches": ("inception", "pipeline_in_branches", PIPELINE_IN_BRANCHES, (8, 3)),
    "towers": ("towers", TOWERS, ((), (), (0, 1)), (8, 5)),
    "unet": ("unet", UNET, ((), (0,), (1,), (0, 2)), (6, 3)),
    "t5": ("t5", ENCODER_DECODER, ((), (), (0, 1)), (5, 3)),
}


PROVEN = ["branches_in_pipeline 1f1b", "pipeline_in_branches afab", "towers 1f1b", "unet afab"]
EVERY = [f"{case} {schedule}" for case in CASES for schedule in ("1f1b", "afab")]


@pytest.mark.parametrize(
    "named", subsets.one_in(2, subsets.except_slow(EVERY, [each for each in EVERY if each not in PROVEN]))
)
def test_branches(named: str) -> None:
    case, schedule = named.split()
    model, plan, before, sizes = CASES[case]
    read = load(PLANS / f"{plan}.yaml").model_copy(update={"microbatches": 3}) if isinstance(plan, str) else plan
    optimizer = adamw if schedule == "1f1b" else sgd
    prepared = prepared_for(model, read.model_copy(update={"schedule": schedule}), optimizer, sizes[0])
    assert StageGraph.of_edges(prepared.main_partition.stages, prepared.main_partition.edges).predecessors == before
    assert_cut(model, prepared)
    row = table.Row(model, prepared.plan.spec, schedule, prepared.plan.microbatches, "sgd", sizes)
    verdict = verdict_on(row, prepared)
    assert verdict.passed, f"{row}: worst {verdict.worst:.2g}, {verdict.culprit}"
    assert verdict.worst <= 1e-9 and verdict.replicas_equal and any(d.gradient is not None for d in verdict.deviations)


def test_a_stage_of_several_pieces() -> None:
    """Both first layers of two towers on one device, both second ones on another."""
    plan = stages(
        (["query.0", "query.1", "document.0", "document.1"], {}),
        (["query.2", "div", "document.2", "numpy_T"], {"data": 2}),
        (["matmul", "loss"], {}),
    ).model_copy(update={"microbatches": 1})
    prepared = prepared_for("towers", plan, sgd, 8)
    assert [stage for _, _, stage in prepared.main_partition.pieces] == [0, 1, 0, 1, 2]
    assert verdict_on(table.Row("towers", "", "1f1b", 1, "sgd", (8, 7, 5)), prepared).passed


class Helped(nn.Module):
    """An auxiliary head, which only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.aux, self.body = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.stem(x).tanh()
        return (self.aux(hidden), self.body(hidden)) if self.training else (self.body(hidden),)


def helped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    *aux, out = model(batch[0])
    return F.cross_entropy(out, batch[1]) + sum(0.3 * F.cross_entropy(each, batch[1]) for each in aux)


@pytest.mark.parametrize(
    "meshes",
    subsets.one_in(3, [({}, {}, {}), ({"data": 2}, {}, {"tensor": 2}), ({}, {"tensor": 2}, {"data": 2})], first=1),
    ids=str,
)
def test_a_branch_that_only_training_has(meshes: tuple[dict[str, int], ...]) -> None:
    nodes = (["stem", "tanh"], ["aux", "aux"], ["body", "loss"])
    batches = [batch_of(samples, seed) for seed, samples in enumerate((8, 7, 5))]

    def work(job: Job) -> tuple[list[float], dict[str, Tensor]]:
        return [value for b in batches for value in (job.step(b).loss, job.evaluate(b))], job.state_dict()

    def run(plan: str | Plan) -> list[Any]:
        torch.manual_seed(0)
        return workers(work, Helped().double(), plan, loss=helped)

    ((losses, state),) = run("data=1,microbatches=2")
    for own, weights in run(stages(*zip(nodes, meshes, strict=True))):
        assert own == pytest.approx(losses, rel=1e-10)
        assert_state(weights, state)


@pytest.mark.parametrize(
    ("described", "says"),
    [
        (
            [["stem", "blocks.0.point", "blocks.0/cat", "loss"], ["blocks.0.near", "blocks.0.pooled"]],
            "stages wait for each other: stage 0 needs blocks.0.pooled.1.2/relu of stage 1, which itself needs what",
        ),
        (
            [["stem", "blocks.0.point"], ["blocks.0.far", "blocks.0.pooled"], ["blocks.0/cat", "loss"]],
            "stages: blocks.0/cat on stage 2 needs blocks.0.near.1.2/relu, which no stage computes",
        ),
        (
            [["stem", "blocks.0.near"], ["blocks.0.near.1", "blocks.0.pooled"], ["blocks.0/cat", "loss"]],
            "stages.1.nodes: blocks.0.near.1.0/conv2d is on stage 0 already: every node has one stage",
        ),
    ],
)
def test_stages_that_cannot_be(described: list[list[str]], says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        prepared_for("inception", stages(*((nodes, {}) for nodes in described)), sgd, 4)
    assert says in str(caught.value)
