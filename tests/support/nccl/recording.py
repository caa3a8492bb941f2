"""Trains a small model by a plan over the fake NCCL, and returns what every rank launched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import polylane
from benchmarks.gpu.trainings import batch_of, build, sgd, train_plainly, trainings
from polylane.runtime.transport.choose import VARIABLE
from polylane.runtime.workers import world
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.support.nccl import fake_nccl
from tests.support.nccl.fake_nccl import Launch

STEPS = 2


@dataclass
class Recording:
    """What a training over the fake NCCL did.

    Attributes:
        launches: by rank, its launches in order.
        communicators: by rank, the number of its communicators.
        weights: the weights after the last step.
        difference: largest relative difference of a weight from the plain loop's.
    """

    launches: list[list[Launch]]
    communicators: list[int]
    weights: dict[str, Tensor]
    difference: float


def record_training(name: str, plan: str, workers: int, steps: int = STEPS) -> Recording:
    """Train by a plan on ``workers`` processes, in float64, and record; ``name`` is one of the trainings' names.

    Raises:
        WorkerFailed: the training failed, or did not end.
    """
    reports = fork_workers(partial(_train_recorded, name, plan, steps), workers)
    plain = train_plainly(name, steps, torch.device("cpu"))
    weights = reports[0][2]
    difference = max(((weights[key] - plain[key]).norm() / plain[key].norm()).item() for key in plain)
    return Recording([report[0] for report in reports], [report[1] for report in reports], weights, difference)


def become_nccl_worker() -> None:
    """Make this forked worker what a GPU's would be: without shared memory, on a backend that orders its kernels."""
    torch.set_num_threads(1)
    fake_nccl.use_fake_nccl()
    os.environ[VARIABLE] = "gloo"
    assert world._started is not None
    world._started = replace(world._started, backend=fake_nccl.NAME)


def _train_recorded(
    name: str, plan: str, steps: int, context: WorkerContext
) -> tuple[Sequence[Launch], int, dict[str, Tensor]]:
    become_nccl_worker()
    model, loss, dtype = build(name, torch.float64), trainings()[name][1], torch.float64
    example = batch_of(name, 0, dtype)
    job = polylane.parallelize(model, loss, sgd, example=example, plan=plan, audit="off")
    with job:
        for step in range(steps):
            fake_nccl.RECORDER.phase = f"step {step}"
            job.step(batch_of(name, step, dtype))
        fake_nccl.RECORDER.phase = "end"
        weights = job.state_dict()
    return fake_nccl.RECORDER.launches, len(fake_nccl.RECORDER.communicators), weights
