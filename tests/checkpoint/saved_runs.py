"""Small trainings that save checkpoints, and load them, on forked workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify


def small_model(hidden: int = 8, dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), nn.Tanh(), nn.Linear(hidden, 4, bias=bias)
    ).to(dtype)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters), lr=0.1)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    matrices, others = list[Any](), list[Any]()
    for _, each in parameters:
        (matrices if each.dim() > 1 else others).append(each)
    return torch.optim.SGD([{"params": matrices}, {"params": others}], lr=0.1, momentum=0.9)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@functools.cache
def compile_once(
    plan: str, make: Callable[[], nn.Module] = small_model, optimizer: Any = momentum, scheduler: Any = halving
) -> CompiledTraining:
    model = make()
    return compile_training(model, build_objectives(classify, optimizer, scheduler), example_of(model), plan)


def example_of(model: nn.Module, seed: int = 0) -> Any:
    inputs, labels = batch_of(8, seed)
    return inputs.to(next(model.parameters()).dtype), labels


def on_workers(prepared: CompiledTraining, work: Callable[[Job], Any]) -> list[Any]:
    """What ``work(job)`` returns on every worker; a worker that raises leaves without the others."""

    def run(_: Any) -> Any:
        with Job(prepared, World.join(), example=example_of(prepared.model), seed=3) as job:
            return work(job)

    return fork_workers(run, prepared.plan.processes)


def train(job: Job, steps: int) -> list[float]:
    first = job.position.step
    return [job.step(example_of(job.model, first + number)).loss for number in range(steps)]


def save_steps(plan: str, folder: Path, *at: int) -> None:
    """Train, and save a checkpoint after each of some steps."""

    def work(job: Job) -> None:
        for step in at:
            train(job, step - job.position.step)
            job.save_checkpoint(folder)

    on_workers(compile_once(plan), work)
