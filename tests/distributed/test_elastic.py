"""Workers under torchrun's agent: the same results, messages and errors as forked ones."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

import commands_run
from polylane.commands.running.worker import watched_by
from polylane.compile.objectives import build_objectives
from polylane.diagnosis.report import HangReport
from polylane.errors import PolylaneError, WorkerFailed, WorkerHung
from polylane.runtime.job import Job
from polylane.runtime.progress.watch import HangWatch
from polylane.runtime.progress_page import ProgressMemory
from polylane.runtime.workers.fork import WorkerContext
from polylane.runtime.workers.spawn import spawn_workers
from training import batch_of, classify, compiled, mlp, sgd


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes have what is imported here; a cold one is started by the tests of the command line."""
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", commands_run.spawn)


def add_up(context: WorkerContext) -> torch.Tensor:
    context.send_message({"from": context.rank})
    value = torch.tensor(float(context.rank + 1))
    context.world.connect()
    dist.all_reduce(value)
    return value


def raise_on_one(context: WorkerContext) -> None:
    if context.rank == 1:
        raise ValueError("the model is wrong")
    context.world.connect()
    dist.barrier()


def die_on_one(context: WorkerContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    context.world.connect()
    dist.barrier()


def leave_on_one(waits: bool, context: WorkerContext) -> None:
    if context.rank == 1:
        os._exit(0)
    if waits:
        context.world.connect()
        dist.barrier()


def leave(context: WorkerContext) -> None:
    os._exit(0)


def test_results_and_messages():
    heard: list[tuple[int, int]] = []
    handler = signal.getsignal(signal.SIGTERM)
    assert spawn_workers(add_up, 2, lambda rank, content: heard.append((rank, content["from"]))) == [3.0, 3.0]
    assert sorted(heard) == [(0, 0), (1, 1)]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_one_raises_while_the_other_waits():
    with pytest.raises(WorkerFailed, match="ValueError: the model is wrong") as caught:
        spawn_workers(raise_on_one, 2)
    assert caught.value.rank == 1


def test_one_is_killed():
    with pytest.raises(WorkerFailed, match="worker 1 failed: it was killed by SIGKILL"):
        spawn_workers(die_on_one, 2)


@pytest.mark.parametrize("waits", [True, False])
def test_one_leaves_without_a_word(waits: bool):
    """To the agent an exit with code 0 is a success; whoever waits for it reports a lost peer, which is no cause."""
    with pytest.raises(WorkerFailed, match=r"worker 1 failed: it ended without a result \(exit code 0\)"):
        spawn_workers(partial(leave_on_one, waits), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_leave_without_a_word(workers: int):
    with pytest.raises(WorkerFailed, match=r"worker \d failed: it ended without a result \(exit code 0\)"):
        spawn_workers(leave, workers)


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(PolylaneError, match="define it in a module"):
        spawn_workers(lambda context: None, 2)


def stop_one(launcher: int, pages: dict[int, tuple[int, int]], context: WorkerContext) -> None:
    prepared = compiled(mlp(6, 8, 4), build_objectives(classify, sgd, None), batch_of(8), "data=2")
    job = Job(prepared, watched_by(launcher, pages, context.world), example=batch_of(8))
    for step in range(100_000):
        if context.rank == 1 and step == 5:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        job.step(batch_of(8))


def test_a_stopped_worker_is_named():
    kept, pages = list[HangReport](), {rank: ProgressMemory.allocate() for rank in range(2)}
    watch = HangWatch(pages, "stop", 0.6, kept.append)
    descriptors = {rank: (page.file, page.stacks) for rank, page in pages.items()}
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 .* it is stopped .*; rank 0 waits for it"):
            spawn_workers(partial(stop_one, os.getpid(), descriptors), 2, watch=watch.check)
    finally:
        watch.close()
    assert kept[0].culprits == (1,) and kept[0].ranks[1].stacks
