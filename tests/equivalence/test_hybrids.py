"""The promise for stages that differ, each with its own mesh; and for data, pipeline and tensor at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane import Mean
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.placement.placement import Shard
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.spec import parse
from polylane.verify.verify import verify
from tests.equivalence import table
from tests.equivalence.test_equivalence import compile_case, objective_of, sgd, verdict_on
from tests.support import subsets

ROWS = """
model     / sizes / plan                                   / proof
inception / 5 3   / [data=2,tensor=2 | tensor=3]           / afab 2 own
gpt       / 8 3   / [data=2 | sequence=2,tensor=2]         / naive 4 adamw
hf_llama  / 5 2   / [data=3 | 1 | data=2 | tensor=2]       / afab 3 sgd
hf_gpt2   / 5 3   / [data=2 | 1 | tensor=2]                / 1f1b 4 adamw
towers    / 8 5   / [data=2 | tensor=2]                    / naive 1 own
routed    / 7 3   / [data=3 | tensor=2 | data=2]           / 1f1b 2 adamw
nested    / 9 2   / [data=3 | data=2]                      / afab 4 sgd
gpt       / 8 3   / data=2,pipeline=2,tensor=2             / 1f1b 2 adamw
"""
FURTHER = """
model     / sizes / plan                                   / proof
digits    / 8 5 3 / [1 | data=3]                           / naive 3 sgd
inception / 8 7 3 / [1 | data=2 | 1]                       / 1f1b 4 sgd
unet      / 6 5 3 / [tensor=2 | data=2 | 1]                / 1f1b 3 adamw
gpt       / 8 7 3 / [sequence=2 | data=2 | tensor=2]       / 1f1b 2 own
hf_llama  / 5 3 2 / [tensor=2 | data=2,tensor=2 | 1]       / 1f1b 2 adamw
towers    / 8 7 5 / [data=2 | data=2,tensor=2 | data=2]    / naive 1 sgd
towers    / 8 7 5 / [data=3 | data=2 | 1]                  / naive 1 adamw
digits    / 8 7 5 / [data=2 | tensor=2 | 1]                / 1f1b 2 adamw
unet      / 6 5 3 / [data=3 | 1 | data=2]                  / afab 2 own
encoder   / 8 7 3 / [sequence=2 | tensor=3 | data=2]       / 1f1b 2 adamw
"""


def rows(text: str) -> list[table.Row]:
    found = []
    for line in text.strip().splitlines()[1:]:
        model, sizes, plan, proof = (cell.strip() for cell in line.split("/"))
        schedule, microbatches, optimizer = proof.split()
        batches = tuple(int(size) for size in sizes.split())
        found.append(table.Row(model, plan, schedule, int(microbatches), optimizer, batches))
    return found


def prepared_for(row: table.Row) -> CompiledTraining:
    return compile_case(row.model, objective_of(row), row.spec, row.batches[0])


def assert_cut(model: str, prepared: CompiledTraining) -> None:
    """Every stage has something to cut along each of its axes, and its parameters along that one that is for them."""
    assert prepared.layouts or not prepared.plan.axes
    for objective, made in prepared.layouts.items():
        partition = prepared.partitions[objective]
        for stage in range(prepared.plan.pipeline):
            assert set(made.axes(stage)) >= set(prepared.plan.axes_of(stage))
            layout, names = made[stage], {node.name for node in partition.nodes(stage)}
            for axis, split in layout.splits.items() if layout is not None else ():
                cut = any(step.share < 1 for name, step in split.strategies.items() if name in names)
                assert cut or (model, axis) in table.UNSPLIT, f"{model}: stage {stage} has nothing to cut over {axis}"
                keys = [(f"parameter:{name}", 0) for name in partition.parameters(stage)]
                cut = any(isinstance(split.source_placements.get(key), Shard) for key in keys)
                assert cut == (axis == "tensor"), f"{model}: parameters of stage {stage} over {axis}"


@pytest.mark.parametrize("row", subsets.one_in(3, rows(ROWS)), ids=str)
def test_stages_with_meshes_of_their_own(row: table.Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(FURTHER), ids=str)
def test_further_meshes(row: table.Row) -> None:
    check(row)


def check(row: table.Row) -> None:
    prepared = prepared_for(row)
    plan = prepared.plan
    assert plan.is_uniform == ("[" not in row.plan) and plan.spec == row.spec and plan.workers <= 8
    assert plan == plan_from_partition(prepared.main_partition, parse(row.spec), row.microbatches)
    assert_cut(row.model, prepared)
    verdict = verdict_on(row, prepared)
    assert verdict.passed, f"{row}: worst {verdict.worst:.2g}, {verdict.culprit}"
    assert verdict.worst <= 1e-9 and verdict.replicas_equal and verdict.steps == len(row.batches)
    assert any(d.gradient is not None for d in verdict.deviations)


class ZeroAtTheStart(nn.Module):
    """An early sum over samples that is zero until its weight is trained: at the start it could as well be a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).relu()
        return self.second(hidden), self.weight * hidden.sum()


def total(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
    out, early = model(batch[0])
    return Mean(F.cross_entropy(out, batch[1], reduction="sum") + early, torch.ones_like(batch[1]).sum())


@pytest.mark.parametrize("plan", ["[data=2 | 1]", "[1 | data=2]", "[data=3 | data=2]"])
def test_an_early_sum_that_is_zero_at_the_start(plan: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in (7, 5, 4)]
    verdict = verify(ZeroAtTheStart(), Objective("loss", total, sgd), batches, plan)
    assert verdict.passed and verdict.worst <= 1e-9, verdict.culprit
