"""The promise: every model, split by any plan, computes in float64 what it computes on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.placement.placement import Shard
from polylane.plan.plan import AnyPlan
from polylane.plan.spec import parse
from polylane.verify.verify import Verdict, batch_in_float64, verify_compiled
from tests.equivalence import table
from tests.support import models, subsets
from tests.support.workers.compiling import compile_training

COVERING, COVERING_SPLIT = table.covering(), table.covering_split()
CLIP_NORM = 0.5  # small enough that it binds


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9, nesterov=True)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=3e-3, weight_decay=0.1)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


@functools.cache
def case_of(name: str) -> models.Case:
    return models.CASES[name]() if name in models.CASES else models.example_case(name)


def objective_of(row: table.Row) -> Objective:
    case = case_of(row.model)
    if row.optimizer == "own":
        return Objective("loss", case.loss, case.optimizer, case.scheduler)
    if row.optimizer == "sgd":
        return Objective("loss", case.loss, sgd)
    return Objective("loss", case.loss, adamw, cosine)


def prepared_for(row: table.Row) -> CompiledTraining:
    """The row's training, ready to run; its capture is shared with all other rows of that model."""
    return compile_case(row.model, objective_of(row), parse(row.spec), row.batches[0])


@functools.cache
def model_of(name: str) -> nn.Module:
    """One of the cases in float64; workers are forked, so that it never changes here."""
    torch.manual_seed(0)
    return case_of(name).model().double()


def compile_case(name: str, objective: Objective, plan: str | AnyPlan, samples: int) -> CompiledTraining:
    example = batch_in_float64(case_of(name).batch(samples, 0))
    return compile_training(model_of(name), {"loss": objective}, example, plan, in_float64=True, shared=True)


def verdict_on(row: table.Row, prepared: CompiledTraining) -> Verdict:
    before = copy.deepcopy(prepared.model.state_dict())
    batches = [case_of(row.model).batch(samples, step) for step, samples in enumerate(row.batches)]
    verdict = verify_compiled(prepared, batches, clip_norm=CLIP_NORM if row.optimizer == "adamw" else None, seed=7)
    assert all(torch.equal(before[name], value) for name, value in prepared.model.state_dict().items())
    return verdict


def check(row: table.Row) -> None:
    prepared = prepared_for(row)
    verdict = verdict_on(row, prepared)
    assert verdict.passed, f"{row}: worst {verdict.worst:.2g}, {verdict.culprit}"
    assert verdict.worst <= 1e-9 and verdict.replicas_equal and verdict.steps == len(row.batches)
    assert any(d.gradient is not None for d in verdict.deviations)
    layouts = [layout for each in prepared.layouts.values() for layout in each.distinct]
    for axis, split in (axis_split for layout in layouts for axis_split in layout.splits.items()):
        cut = any(strategy.share < 1 for strategy in split.strategies.values())
        assert cut or (row.model, axis) in table.UNSPLIT, f"{row}: nothing is split over {axis}"
        parameters = [p for key, p in split.source_placements.items() if key[0].startswith("parameter:")]
        assert (axis == "tensor") == any(isinstance(p, Shard) for p in parameters), f"{row}: {axis}"


@pytest.mark.parametrize("row", COVERING, ids=str)
def test_covering(row: table.Row) -> None:
    check(row)


# Other rows have their plans, and test_whole_graphs.py splits the operators of all models.
LONG = ("unet", "two_devices", "vit", "densenet", "moe", "latents")
SELDOM = [row for row in COVERING_SPLIT if row.model in LONG or (row.model, row.plan) == ("gpt", "tensor=3")]


@pytest.mark.parametrize("row", subsets.except_slow(COVERING_SPLIT, SELDOM), ids=str)
def test_covering_splits_of_operators(row: table.Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [*table.full(), *table.full_split()], ids=str)
def test_every_combination(row: table.Row) -> None:
    check(row)


def test_the_covering_table_covers() -> None:
    """Every model, plan, schedule and optimizer; each plan under each schedule; every case of the tests but towers."""
    assert {row.model for row in COVERING} == {*models.TINY, *models.CASES} - {"towers"}
    proven = {(row.plan, row.schedule) for row in COVERING}
    deep = {(p, s) for p in ("pipeline=2", "data=2,pipeline=2") for s in table.PIPELINED}
    assert proven == deep | {(p, s) for p in table.PLANS for s in table.SCHEDULES}
    for optimizer in table.OPTIMIZERS:
        assert {row.plan for row in COVERING if row.optimizer == optimizer} == set(table.PLANS)
    short = [row for row in COVERING if min(row.batches) < row.microbatches]
    uneven = [row for row in COVERING if "data" in row.plan and any(b % (2 * row.microbatches) for b in row.batches)]
    assert len(short) >= 6 and len(uneven) >= 6


def test_the_covering_table_of_splits_covers() -> None:
    """Every model but the one without operators; each plan under two schedules at least, with a pipeline under all."""
    # The two largest are split by operators beside test_hybrids.py, whose stages have meshes of their own.
    assert {row.model for row in COVERING_SPLIT} == {*models.TINY, *models.CASES} - {"branching", "t5", "hf_llama"}
    rows = [row for row in COVERING_SPLIT if row.model != "towers"]
    for plan in table.SPLIT_PLANS:
        schedules = {row.schedule for row in rows if row.plan == plan}
        assert len(schedules) >= (len(table.SCHEDULES) if "pipeline" in plan else 2), plan
        assert len({row.optimizer for row in rows if row.plan == plan}) >= 2, plan
    assert any(row.model == "towers" and row.plan == "data=2" for row in COVERING_SPLIT)


def test_dropout_is_on_where_a_model_has_it() -> None:
    """So that the proofs hold with it and not without it."""
    random = {name for name in {*models.TINY, *models.CASES} if name not in ("branching", "towers") and _draws(name)}
    assert {"gpt", "hf_gpt2", "t5", "vit", "moe", "encoder"} <= random


def _draws(name: str) -> bool:
    row = next(row for row in COVERING if row.model == name)
    return prepared_for(row).main_partition.graph.code.random
