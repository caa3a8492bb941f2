"""Calls that were recorded and not run move a model's state in their order, and before the script looks at it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polylane
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.loops import Prepare, samples, sums_of
from tests.script.model_state.state_traps import build


def unprepared(*objects: Any) -> Any:
    return objects


def backward_in_order(prepare: Prepare) -> list[float]:
    """Two losses of two calls, the older first; a third call is dropped between them."""
    model, _, loader = prepare(*build())
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    model(x * 3)
    second_loss = F.cross_entropy(model(x + 1), y)
    loss.backward()
    second_loss.backward()
    return [loss.item(), second_loss.item(), *model.norm.running_mean.tolist(), *sums_of(model)]


def test_losses_out_of_order_move_statistics_in_the_order_of_the_calls() -> None:
    def run(prepare: Prepare) -> list[float]:
        model, _, loader = prepare(*build())
        x, y = next(iter(loader))
        losses = [F.cross_entropy(model(x + number), y) for number in range(3)]
        for loss in reversed(losses):
            loss.backward()
        return [*(loss.item() for loss in losses), *model.norm.running_mean.tolist()]

    assert run(partial(polylane.prepare, plan="data=1")) == pytest.approx(run(unprepared), rel=1e-9)
    prepared = partial(polylane.prepare, plan="data=1")
    assert backward_in_order(prepared) == pytest.approx(backward_in_order(unprepared), rel=1e-9)


def test_a_loss_of_calls_around_another_loss_s_is_refused() -> None:
    model, _, loader = polylane.prepare(*build(), plan="data=1")
    x, y = next(iter(loader))
    outputs = [model(x + number) for number in range(3)]
    loss = F.cross_entropy(outputs[0] + outputs[2], y)
    second_loss = F.cross_entropy(outputs[1], y)
    with pytest.raises(PolylaneError, match=r"call backward\(\) in the order of the model's calls"):
        loss.backward()
    assert second_loss is not None


def read_new_form(prepare: Prepare) -> list[float]:
    """A form of step that is captured while the script reads a buffer, inside of a function of torch's."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = samples().tensors
    model[1].eval()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model[1].train()
    loss = F.cross_entropy(model(x), y)
    numbers: list[float] = model[1].running_mean.tolist()
    loss.backward()
    return [*numbers, loss.item(), *model[1].running_mean.tolist()]


def test_a_step_that_a_function_of_torch_asks_for_is_captured_as_any_other() -> None:
    def run(context: WorkerContext) -> list[float]:
        return read_new_form(partial(polylane.prepare, plan="tensor=2"))

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(read_new_form(unprepared), rel=1e-9)


def clamp_aliases(prepare: Prepare) -> list[float]:
    """Aliases of weights from before the plan's start, by which these are clamped."""
    model, optimizer, loader = prepare(*build())
    aliases = [parameter.data for parameter in model.parameters()]
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for alias in aliases:
            alias.clamp_(-0.2, 0.2)
    return [*(alias.sum().item() for alias in aliases), *sums_of(model)]


def test_aliases_from_before_the_start_are_those_of_parts() -> None:
    def run(context: WorkerContext) -> list[float]:
        return clamp_aliases(partial(polylane.prepare, plan="tensor=2"))

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(clamp_aliases(unprepared), rel=1e-9)
