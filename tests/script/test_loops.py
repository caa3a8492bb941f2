"""Prepared loops print what the plain loops print, under every kind of plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import polylane
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script import loop
from polylane.script.deferred import DeferredTensor
from tests.script.loops import LOOPS, samples
from tests.script.weight_loops import WEIGHT_LOOPS

PLANS = ["data=1", "data=2", "pipeline=2", "tensor=2", "data=2,shard=parameters"]


def unprepared(*objects: Any) -> Any:
    return objects


ALL_LOOPS = LOOPS | WEIGHT_LOOPS
# One plan of each kind, on the loop that asks most of it; all others are slow.
QUICK = {
    ("adversaries", "pipeline=2"),
    ("classify", "data=2"),
    ("measure_first", "tensor=2"),
    ("evaluate_closures", "tensor=2"),
    ("convolve_graph", "pipeline=2"),
    ("clip_norms", "pipeline=2"),
    ("penalize", "tensor=2"),
    ("copy_models", "data=2,shard=parameters"),
}
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in QUICK else pytest.mark.slow)
    for name in ALL_LOOPS
    for plan in PLANS
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_prepared_loop_prints_the_plain_loop_s_numbers(name: str, plan: str) -> None:
    expected = ALL_LOOPS[name](unprepared)

    def run(context: WorkerContext) -> list[float]:
        return ALL_LOOPS[name](partial(polylane.prepare, plan=plan))

    for numbers in fork_workers(run, 2 if "2" in plan else 1):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_large_outputs_of_evaluations_are_gathered_where_they_are_asked_for(plan: str) -> None:
    def measure(prepare: Any) -> tuple[list[float], bool]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = prepare(model, optimizer)
        numbers, is_deferred = list[float](), False
        for x, y in DataLoader(samples(), batch_size=12):
            with torch.no_grad():
                unused, output = model(x), model(2 * x)
            is_deferred = isinstance(output, DeferredTensor)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            numbers += [F.cross_entropy(output, y).item(), output.argmax(1).eq(y).sum().item(), float(unused.dim())]
        return numbers, is_deferred

    def run(context: WorkerContext) -> tuple[list[float], bool]:
        loop.LARGE_OUTPUT = 0
        return measure(partial(polylane.prepare, plan=plan))

    expected, _ = measure(unprepared)
    for numbers, is_deferred in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert is_deferred
