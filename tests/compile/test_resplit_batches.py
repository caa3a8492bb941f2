"""Samples that are divided anew between stages: only where their order is known, and known alike by all workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.samples.batch_layout import BatchLayout
from tests.support import models
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.first(x).sort(0).values)
        return logits


def one_each(graph: Graph, *_: Any) -> tuple[float, ...]:
    return (1.0,) * len(graph.nodes)


def prepared(model: nn.Module, plan: str | Plan, loss: Any = classify, example: Any = None) -> CompiledTraining:
    example = batch_of(8) if example is None else example
    return compile_training(model, build_objectives(loss, sgd, None), example, plan, seconds=one_each, evaluation=True)


def cut_at(first: list[str], second: list[str]) -> Plan:
    stages = [{"nodes": first, "devices": [0, 1], "mesh": {"data": 2}}, {"nodes": second, "devices": [2]}]
    return Plan.model_validate({"stages": stages, "microbatches": 1})


def test_samples_that_are_sorted_are_not_divided_anew() -> None:
    with pytest.raises(PolylaneError) as caught:
        prepared(Sorting().double(), cut_at(["first", "getitem"], ["second", "loss"]))
    assert "getitem (" in str(caught.value)
    told = str(caught.value)
    assert "cannot be divided anew: give them the same data, or cut elsewhere: no rule says of sort (" in told


def test_nor_are_those_of_a_model_on_the_meta_device() -> None:
    model = Sorting().double().to("meta")
    with pytest.raises(PolylaneError) as caught:
        prepared(model, cut_at(["first", "getitem"], ["second", "loss"]))
    told = str(caught.value)
    assert (
        "crosses between stages with data=1 and data=2, but how the samples of a batch make it up is not known" in told
    )
    assert "no rule says of sort (" in told and "test_resplit_batches.py:" in told
    before = prepared(model, cut_at(["first", "first"], ["sort", "loss"]))
    assert before.main.orders["first/linear"] is BatchLayout.SHARDED_BY_SAMPLE


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "[data=2 | 1]"),
        pytest.param("hf_llama", "[data=2 | 1]", marks=pytest.mark.slow),
        pytest.param("t5", "[1 | data=2,tensor=2 | data=3]", marks=pytest.mark.slow),
    ],
)
def test_language_models_on_the_meta_device_are_divided_anew(name: str, plan: str) -> None:
    case = models.CASES[name]() if name in models.CASES else models.example_case(name)
    with torch.device("meta"):
        model = case.model()
    made = prepared(model, plan, case.loss, case.batch(6, 0))
    for graph in (*made.graphs.values(), *made.evaluations.values()):
        crossings = graph.partition.crossings
        assert {graph.orders[each.value] for each in crossings} - {BatchLayout.REPLICATED} == {
            BatchLayout.SHARDED_BY_SAMPLE
        }


def test_workers_that_saw_another_order_do_not_start() -> None:
    example, model = batch_of(8), mlp(6, 8, 4)
    made = prepared(model, "[data=2 | 1]")
    crossing = made.main_partition.crossings[0]
    (graph,) = made.graphs.values()
    other = replace(made, graphs={"loss": replace(graph, orders={**graph.orders, crossing.value: BatchLayout.MEAN})})

    def work(_: Any) -> str:
        world = World.join()
        with pytest.raises(PolylaneError) as caught:
            Job(other if world.rank == 1 else made, world, example=example)
        return str(caught.value)

    told = fork_workers(work, 3)
    assert all(each.startswith("workers found the samples in another order in what crosses") for each in told)
