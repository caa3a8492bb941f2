"""A run on a team of workers that ran something before gives every bit that it gives on workers of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.runtime.job import Job
from polylane.verify import worker_runs
from polylane.verify.free_run import FreeRun, train_freely
from polylane.verify.record import ComparedTraining
from polylane.verify.worker_runs import can_start_again, run_on_workers
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import Pairs, adamw, batch_of, classify

BATCHES = [batch_of(8, seed=step) for step in range(3)]
CALLS: list[str] = []  # what factories count in this file's globals


class Remembers(nn.Module):
    """Everything that a run changes: weights, running statistics, random numbers, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.steps = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.last(self.inner(self.drop(torch.relu(self.norm(self.first(x)))))) / self.steps


class Split(nn.Module):
    """Two layers and nothing in Python: it may be cut in every way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def counting(parameters: Pairs) -> torch.optim.Optimizer:
    """Another rate at every call in the same process."""
    CALLS.append("optimizer")
    return torch.optim.AdamW(list(parameters), lr=0.01 * len(CALLS))


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    seen: list[int] = []
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (len(CALLS) + len(seen) + step))


def training_of(model: nn.Module, plan: str) -> ComparedTraining:
    # A pipeline takes no optimizer whose updates of one stage depend on what happened to another.
    optimizer, scheduler = (adamw, None) if "pipeline" in plan else (counting, decaying)
    prepared = compile_training(model, build_objectives(classify, optimizer, scheduler), BATCHES[0], plan)
    return ComparedTraining(prepared, BATCHES, clip_norm=0.5, seed=3)


def run(job: Job) -> FreeRun:
    return train_freely(job, BATCHES)


def in_bits(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.dtype, tuple(found.shape), found.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(found, dict):
        return {key: in_bits(value) for key, value in found.items()}
    return repr(found)


PLANS = [
    (Remembers, "data=2"),
    (Split, "data=2,tensor=2"),
    (Split, "data=2,pipeline=2,microbatches=2,shard=parameters"),
    (Split, "data=2,servers=1"),
    (Split, "data=2,every=2"),
]


@pytest.mark.parametrize(("model", "plan"), subsets.one_in(2, PLANS, several=True))
def test_a_second_run_gives_the_bits_of_the_first(model: type[nn.Module], plan: str) -> None:
    training = training_of(model(), plan)
    assert can_start_again(training)
    first, second = run_on_workers(training, run, run)
    for one, other in zip(first, second, strict=True):
        for field in dataclasses.fields(FreeRun):
            # What a server recorded says when its update was.
            if field.name != "updates":
                assert in_bits(getattr(other, field.name)) == in_bits(getattr(one, field.name)), field.name
    assert len(set(first[0].losses)) == len(BATCHES)


def test_a_model_with_a_hook_has_workers_of_its_own_for_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hook keeps nobody restores."""
    model, calls, teams = Split(), list[int](), list[int]()

    def damp(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient / len(calls)

    model.first.bias.register_hook(damp)
    training, fork = training_of(model, "data=2"), worker_runs.fork_workers
    monkeypatch.setattr(worker_runs, "fork_workers", lambda work, count: teams.append(count) or fork(work, count))
    first, second = run_on_workers(training, run, run)
    assert teams == [2, 2]
    assert first[0].losses == second[0].losses
