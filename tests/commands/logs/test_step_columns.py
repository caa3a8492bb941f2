"""Columns of observed steps: shares add up, operations are counted as by hand, tokens are those of the batch."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polylane.commands.logs.step_columns import SHARES, StepColumns, find_product_dtype, step_flops
from polylane.plan.spec import parse
from polylane.runtime.job import Job
from polylane.runtime.telemetry.matmul_rate import measure_matmul_rate
from tests.support.workers.training import batch_of, classify, mlp, workers

SAMPLES = 8


def columns_of(job: Job) -> list[dict[str, Any]]:
    graph = job.worker._prepared.main_partition.graph  # type: ignore[union-attr]
    columns = StepColumns(job.plan, lambda: graph, 1e9, nullcontext)
    described = [columns.add(job.step(batch_of(SAMPLES, step))) for step in range(5)]
    return [*(line for line in described if line), columns.means()]


@pytest.mark.parametrize("plan", ["data=2", "data=3", "pipeline=2", "tensor=2", "data=2,shard=parameters", "data=1"])
def test_shares_add_up_and_the_largest_loss_is_that_of_a_replica(plan: str) -> None:
    *lines, means = workers(columns_of, mlp(6, 12, 12, 4), plan)[0]
    assert len(lines) >= 2
    for line in lines:
        assert sum(line[name] for name in SHARES) == pytest.approx(1, abs=1e-9)
        assert sum(line["waiting_for"].values()) == pytest.approx(line["waiting"], abs=1e-9)
        assert all(0 <= line[name] <= 1 for name in ("loading", "checkpoint_stall"))
        assert line["flops_per_second"] > 0 and line["device_share"] > 0 and line["gradient_norm"] > 0
        assert all(byte > 0 for byte in line["memory"])
    assert sum(means.get(name, 0) for name in SHARES) == pytest.approx(1, abs=1e-9)
    replicas = 3 if plan == "data=3" else 2 if plan.startswith("data=2") else 1
    parts = [slice(k * SAMPLES // replicas, (k + 1) * SAMPLES // replicas) for k in range(replicas)]
    if SAMPLES % replicas == 0:
        inputs, labels = batch_of(SAMPLES, 0)
        model = copy.deepcopy(mlp(6, 12, 12, 4))
        worst = max(classify(model, (inputs[part], labels[part])).item() for part in parts)
        assert lines[0]["loss_max"] == pytest.approx(worst, rel=1e-12)


def test_operations_of_a_step_are_three_times_those_of_its_products() -> None:
    def flops(job: Job) -> int:
        return step_flops(job.worker._prepared.main_partition.graph)  # type: ignore[union-attr]

    products = 2 * SAMPLES * (6 * 120 + 120 * 4)
    (counted,) = workers(flops, mlp(6, 120, 4), "data=1")
    assert 3 * products - 2 * SAMPLES * 6 * 120 <= counted <= 3.2 * products


@pytest.mark.parametrize(("plan", "dtype"), [("data=1", torch.float64), ("data=1,precision=bfloat16", torch.bfloat16)])
def test_the_device_is_measured_in_the_dtype_of_the_products(plan: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 120), nn.Linear(120, 4)).double()
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))  # few elements of another
    model.register_parameter("counts", nn.Parameter(torch.ones(4000, dtype=torch.int64), requires_grad=False))
    chosen: Any = SimpleNamespace(precision=parse(plan).precision)
    assert find_product_dtype(chosen, model) is dtype
    assert measure_matmul_rate(torch.device("cpu"), dtype) > 0


def test_what_is_not_known_is_left_out() -> None:
    def describe(job: Job) -> list[str]:
        columns = StepColumns(job.plan, lambda: None, 1e9, nullcontext)
        line = columns.add(job.step(batch_of(SAMPLES)))
        return [name for name, value in line.items() if isinstance(value, float) and math.isnan(value)] + list(line)

    names = workers(describe, nn.Sequential(*mlp(6, 12, 12, 4)), "pipeline=2,schedule=pipedream")[0]
    assert "device_share" not in names and "gradient_norm" not in names and "loss_max" in names


def test_the_loss_scale_is_that_of_the_passes() -> None:
    """Step 1 is left out for a number that float16 has not; step 2, which is observed, has half the scale."""

    def train(job: Job) -> list[float]:
        columns = StepColumns(job.plan, lambda: None, 1e9, nullcontext)
        batches = [tuple(x.float() if x.is_floating_point() else x for x in batch_of(SAMPLES, i)) for i in range(4)]
        batches[1][0][0] = batches[2][0][0] = 1e6
        return [line["loss_scale"] for batch in batches if (line := columns.add(job.step(batch)))]

    example = (batch_of(SAMPLES)[0].float(), batch_of(SAMPLES)[1])
    for plan in ("data=2", "pipeline=2"):
        for scales in workers(train, mlp(6, 8, 4).float(), f"{plan},precision=float16", example=example):
            assert scales[:2] == [2.0**16, 2.0**15]  # not that of the next passes, though step 2 is left out, too
    assert all("loss_scale" not in line for line in workers(columns_of, mlp(6, 8, 4), "data=1")[0])
