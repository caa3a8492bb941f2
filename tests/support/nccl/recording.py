"""Trains a small model by a plan over the fake NCCL, and returns what every rank launched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import polylane
from benchmarks.gpu.setting import relative_difference
from benchmarks.gpu.trainings import batch_of, build, sgd, train_plainly, trainings
from polylane.runtime.transport.choose import VARIABLE
from polylane.runtime.workers import world
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import StartMethod, start_workers
from tests.support.nccl import fake_nccl
from tests.support.nccl.fake_nccl import Launch
from tests.support.nccl.host_waits import HostWaits

STEPS = 2


@dataclass
class Recording:
    """What a training over the fake NCCL did.

    Attributes:
        launches: by rank, its launches in order.
        communicators: by rank, the number of its communicators.
        weights: the weights after the last step.
        difference: largest relative difference of a weight from the plain loop's.
        waits: by file, function and operation, how often rank 0's host would wait for its device in the last step.
    """

    launches: list[list[Launch]]
    communicators: list[int]
    weights: dict[str, Tensor]
    difference: float
    waits: Counter[str]


def record_training(
    name: str,
    plan: str,
    workers: int,
    steps: int = STEPS,
    clip_norm: float | None = None,
    start_method: StartMethod = "fork",
    dtype: torch.dtype = torch.float64,
) -> Recording:
    """Train by a plan, and record.

    Args:
        name: one of the trainings' names.
        plan: the plan in one line.
        workers: number of its processes.
        steps: number of steps.
        clip_norm: bound on the gradients' norm; None: none, as in the plain loop.
        start_method: "spawn" where there are devices, pretended or not.
        dtype: of the model; float64 is what no autocast casts.

    Raises:
        WorkerFailed: the training failed, or did not end.
    """
    work = partial(_train_recorded, name, plan, steps, clip_norm, dtype)
    reports = start_workers(work, workers, start_method=start_method)
    plain = train_plainly(name, steps, torch.device("cpu"))
    weights = reports[0][2]
    difference = relative_difference(weights, plain)
    launches, communicators = [report[0] for report in reports], [report[1] for report in reports]
    return Recording(launches, communicators, weights, difference, reports[0][3])


def become_nccl_worker() -> None:
    """Make this forked worker what a GPU's would be: without shared memory, on a backend that orders its kernels."""
    torch.set_num_threads(1)
    fake_nccl.use_fake_nccl()
    os.environ[VARIABLE] = "gloo"
    assert world._started is not None
    world._started = replace(world._started, backend=fake_nccl.NAME)


def _train_recorded(
    name: str, plan: str, steps: int, clip_norm: float | None, dtype: torch.dtype, context: WorkerContext
) -> tuple[Sequence[Launch], int, dict[str, Tensor], Counter[str]]:
    become_nccl_worker()
    model, loss = build(name, dtype), trainings()[name][1]
    example, waits = batch_of(name, 0, dtype), HostWaits()
    job = polylane.parallelize(model, loss, sgd, example=example, plan=plan, audit="off", clip_norm=clip_norm)
    with job:
        for step in range(steps):
            fake_nccl.RECORDER.phase = f"step {step}"
            batch = batch_of(name, step, dtype)
            waits.counts.clear()
            waits.put_on_host(batch)
            with waits:
                job.step(batch)
        fake_nccl.RECORDER.phase = "end"
        weights = job.state_dict()
    return fake_nccl.RECORDER.launches, len(fake_nccl.RECORDER.communicators), weights, waits.counts
