"""Averages of the weights: those of torch's AveragedModel, under every plan, in tests, files and checkpoints."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from polylane.errors import PolylaneError
from polylane.optim.averaging import averaged_optimizer
from polylane.runtime.job import Job
from tests.support.workers.training import adamw, batch_of, classify, mlp, sgd, workers

DECAY = 0.8
STEPS = 6
PLANS = ["data=2", "data=2,shard=optimizer", "data=2,shard=parameters", "pipeline=2", "tensor=2", "data=2,pipeline=2"]


def plain_averages(make: Any) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of the steps, the averages after all of them, and the loss at the averages half-way."""
    model = mlp(6, 12, 12, 4)
    optimizer, averaged = make(model.named_parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses, halfway = list[float](), 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = classify(model, batch_of(8, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        averaged.update_parameters(model)
        if step == STEPS // 2:
            halfway = classify(averaged.module, batch_of(8, 99)).item()
    return losses, averaged.module.state_dict(), halfway


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("plan", PLANS)
def test_tests_and_files_have_the_averages_and_steps_the_weights(plan: str, make: Any) -> None:
    losses, averages, halfway = plain_averages(make)

    def train(job: Job) -> Any:
        results, tested = list[float](), 0.0
        for step in range(STEPS):
            results.append(job.step(batch_of(8, step)).loss)
            if step == STEPS // 2:
                tested = job.evaluate(batch_of(8, 99))
        return results, job.state_dict(), tested

    for results, state, tested in workers(train, mlp(6, 12, 12, 4), plan, optimizer=averaged_optimizer(make, DECAY)):
        assert results == pytest.approx(losses, rel=1e-12)
        assert tested == pytest.approx(halfway, rel=1e-12)
        assert all(torch.allclose(state[name], average, rtol=1e-12, atol=1e-14) for name, average in averages.items())


@pytest.mark.parametrize("other", ["data=2,shard=parameters", "pipeline=2"])
def test_another_plan_goes_on_with_weights_and_averages(tmp_path: Path, other: str) -> None:
    losses, averages, _ = plain_averages(adamw)
    build = averaged_optimizer(adamw, DECAY)

    def begin(job: Job) -> None:
        for step in range(STEPS // 2):
            job.step(batch_of(8, step))
        job.evaluate(batch_of(8, 99))  # the averages are in the parameters when the checkpoint is saved
        job.save_checkpoint(tmp_path)

    def go_on(job: Job) -> Any:
        job.load_checkpoint(tmp_path)
        results = [job.step(batch_of(8, step)).loss for step in range(STEPS // 2, STEPS)]
        return results, job.state_dict()

    workers(begin, mlp(6, 12, 12, 4), "data=2", optimizer=build)
    results, state = workers(go_on, mlp(6, 12, 12, 4), other, optimizer=build)[0]
    assert results == pytest.approx(losses[STEPS // 2 :], rel=1e-12)
    assert all(torch.allclose(state[name], average, rtol=1e-12, atol=1e-14) for name, average in averages.items())


@pytest.mark.parametrize(("build", "has"), [(adamw, "none"), (averaged_optimizer(adamw, 0.5), "with 0.5")])
def test_who_keeps_no_such_averages_does_not_go_on_from_them(tmp_path: Path, build: Any, has: str) -> None:
    """Also in a loop of one's own: its weights would be the averages, and what it averages another."""

    def begin(job: Job) -> None:
        job.step(batch_of(8, 0))
        job.evaluate(batch_of(8, 99))
        job.save_checkpoint(tmp_path)

    def go_on(job: Job) -> str:
        with pytest.raises(PolylaneError) as refused:
            job.load_checkpoint(tmp_path)
        return str(refused.value)

    workers(begin, mlp(6, 12, 12, 4), "data=2", optimizer=averaged_optimizer(adamw, DECAY))
    for said in workers(go_on, mlp(6, 12, 12, 4), "data=2", optimizer=build):
        assert f"has averages of weights with a decay of {DECAY}" in said and has in said


def test_a_decay_that_is_none_is_refused() -> None:
    with pytest.raises(PolylaneError, match=r"--ema 1: give the part of the average that remains in a step"):
        averaged_optimizer(sgd, 1.0)


def test_an_optimizer_that_averages_by_itself_is_refused() -> None:
    class Free(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    def build(parameters: Any) -> torch.optim.Optimizer:
        return Free(list(parameters), lr=0.1)

    with pytest.raises(PolylaneError, match="Free gives averaged weights by itself"):
        averaged_optimizer(build, 0.9)(nn.Linear(2, 2).named_parameters())


def test_several_optimizers_keep_averages_each() -> None:
    model = mlp(4, 4, 2)
    build = partial(_halves, list(model.named_parameters()))
    optimizers = averaged_optimizer(build, 0.5)(None)
    before = copy.deepcopy(model.state_dict())
    for optimizer in optimizers:  # type: ignore[attr-defined]
        model(torch.ones(3, 4).double()).sum().backward()
        optimizer.step()
        optimizer.eval()
    assert all(not torch.equal(model.state_dict()[name], value) for name, value in before.items() if "bias" in name)


def _halves(pairs: Any, _: Any) -> Any:
    return [torch.optim.SGD([p for _, p in half], lr=0.1) for half in (pairs[:2], pairs[2:])]
