"""State dicts of optimizers and schedulers in prepared scripts: those of whole parameters, under every plan."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import polylane
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.loops import Prepare, samples, sums_of
from tests.script.test_random_state import unprepared

PLANS = [
    "data=2,shard=parameters",
    "pipeline=2",
    *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("data=1", "data=2", "tensor=2")),
]


def go_back(prepare: Prepare) -> list[float]:
    """A loop that keeps the state of its second step, and goes back to it after the fourth."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    groups = [{"params": model[2].parameters(), "lr": 0.05}, {"params": model[0].parameters()}]
    optimizer: Any = torch.optim.Adam(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, scheduler = prepare(model, optimizer, scheduler)
    optimizer.load_state_dict(optimizer.state_dict())
    numbers, saved = list[float](), dict[str, Any]()
    for number, (x, y) in enumerate(DataLoader(samples(), batch_size=6)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        numbers.append(loss.item())
        if number == 1:
            saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            saved = copy.deepcopy({**saved, "model": model.state_dict()})
            numbers += [state["exp_avg"].sum().item() for state in saved["optimizer"]["state"].values()]
            numbers += saved["optimizer"]["param_groups"][1]["params"]
        if number == 3:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
    shapes = [value.shape for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return numbers + sums_of(model) + [float(size) for shape in shapes for size in shape]


@pytest.mark.parametrize("plan", PLANS)
def test_states_are_those_of_whole_parameters(plan: str) -> None:
    expected = go_back(unprepared)

    def run(context: WorkerContext) -> list[float]:
        return go_back(partial(polylane.prepare, plan=plan))

    for numbers in fork_workers(run, 2 if "2" in plan else 1):
        assert numbers == pytest.approx(expected, rel=1e-9)
