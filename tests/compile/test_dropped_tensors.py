"""What is dropped, to be recomputed: workers and the cost model decide alike, for the samples of each stage's ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.cluster.spec import parse
from polylane.compile.compiled_training import compile_training
from polylane.compile.dropped_tensors import find_dropped_tensors
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.plan.recompute import budget_bytes
from polylane.planner.problem import build_cost_model, fit_plan, fit_to_meshes
from tests.support import planning_graphs, subsets


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(planning_graphs.Block(16) for _ in range(4)))


def normalized() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*(layer for each in layers for layer in each))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def problem(model: nn.Module, samples: int) -> TrainingProblem:
    batch = torch.zeros(samples, 16), torch.zeros(samples, 16)
    return TrainingProblem(model, build_objectives(loss, planning_graphs.adam, None), batch)


@pytest.mark.parametrize(
    ("model", "plan"),
    subsets.one_in(
        2,
        [
            (blocks, "pipeline=2,microbatches=8,recompute=budget:1KB"),  # one sample in a microbatch
            (blocks, "[data=2 | 1],microbatches=4,recompute=budget:1.5KB"),  # twice the samples on the last stage
            (blocks, "data=3,microbatches=1,recompute=budget:3KB"),
            (blocks, "pipeline=2,tensor=2,microbatches=2,recompute=budget:2.5KB"),
            (blocks, "data=2,pipeline=2,replicas=round-robin,microbatches=4,recompute=full"),
            (normalized, "[data=2 | 1],microbatches=2,recompute=full"),
        ],
        first=1,
        several=True,
    ),
)
def test_workers_drop_what_the_cost_model_prices(model: object, plan: str) -> None:
    batch = 8
    training = problem(model(), batch)  # type: ignore[operator]
    compiled = compile_training(training, plan)
    dropped = find_dropped_tensors(compiled.main_partition, compiled.plan, compiled.main.layouts, compiled.samples)
    assert any(dropped)
    # Simulated from a capture of other samples, as the command does.
    captured = training.captured(problem(model(), 2).capture())  # type: ignore[operator]
    basis = build_cost_model(captured, parse("4:cpu"), TrainingOptions())
    partition, fitted = fit_plan(basis, compiled.plan, batch)
    costs = PlanCost(fit_to_meshes(basis, partition, fitted, batch), partition, fitted, batch)
    assert dropped == tuple(costs._drop(stage) for stage in range(fitted.pipeline))
    # A budget holds on the stage whose replicas have the most samples, too.
    for stage in range(fitted.pipeline):
        if (budget := budget_bytes(fitted.recompute_of(stage))) is not None:
            assert costs.microbatch_memory(stage).live_bytes <= budget
