"""Prepared scripts draw the random numbers that they would draw plainly, alike on every worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import polylane
from polylane.graph.python_state.random_generators import States, generator_states, states_equal
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.loops import Prepare, samples, sums_of


def unprepared(*objects: Any) -> Any:
    return objects


def noisy(prepare: Prepare, seed: int, watch: Callable[[str], None] = lambda place: None) -> list[float]:
    """A loop that shuffles and draws from the global generators, whose state is ``seed``'s when it is prepared."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / (number + 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(samples(24), batch_size=6, shuffle=True)
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for x, y in loader:
        noise = torch.randn_like(x) * numpy.random.rand() * random.random()
        watch("before")
        loss = F.cross_entropy(model(x + noise), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
        with torch.no_grad():
            numbers.append(model(x).sum().item())
        watch("after")
    return numbers + sums_of(model)


PLANS = ["data=2", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("data=1", "pipeline=2", "tensor=2"))]


@pytest.mark.parametrize("plan", PLANS)
def test_an_unseeded_script_draws_rank_0_s_numbers_on_every_worker(plan: str) -> None:
    expected = noisy(unprepared, 100)

    def run(context: WorkerContext) -> tuple[list[float], bool]:
        before, is_undrawn = list[States](), True

        def watch(place: str) -> None:
            nonlocal is_undrawn
            if place == "before":
                before.append(generator_states())
            else:
                is_undrawn &= states_equal(before[-1], generator_states())

        def prepare(*objects: Any) -> Any:
            nonlocal is_undrawn
            states = generator_states()
            prepared = polylane.prepare(*objects, plan=plan)
            is_undrawn &= context.rank > 0 or states_equal(states, generator_states())
            return prepared

        return noisy(prepare, 100 + context.rank, watch), is_undrawn

    for numbers, is_undrawn in fork_workers(run, 2 if "2" in plan else 1):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert is_undrawn
