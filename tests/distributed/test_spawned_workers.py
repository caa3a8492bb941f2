"""Workers in new processes: the same results, messages and errors as forked ones."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from polylane.compile.objectives import build_objectives
from polylane.diagnosis.report import HangReport
from polylane.errors import PolylaneError, WorkerFailed, WorkerHung
from polylane.runtime.job import Job
from polylane.runtime.progress.watch import HangWatch
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.team import start_workers
from tests.support.workers import forked_commands
from tests.support.workers.training import batch_of, classify, compiled, mlp, sgd

spawn_workers = partial(start_workers, start_method="spawn")


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes have what is imported here; a cold one is started by the tests of the command line."""
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", forked_commands.spawn)


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


def take_stock(context: WorkerContext) -> tuple[str, bool, list[str]]:
    board = context.world.board
    assert board is not None
    board.all_gather_object(context.rank)
    ranks = [name for name in os.environ if name.endswith("RANK") or name.startswith("TORCHELASTIC")]
    return board.store.path, context.world.stop.is_set(), ranks


def test_they_inherit_what_they_share_and_are_told_nothing_else():
    before = set(Path(tempfile.gettempdir()).glob("polylane-*"))
    for file, is_asked, ranks in spawn_workers(take_stock, 2):
        assert file.startswith("/proc/self/fd/") and not is_asked and not ranks
    assert set(Path(tempfile.gettempdir()).glob("polylane-*")) <= before


def wait_for_request(context: WorkerContext) -> int:
    context.send_message({})
    while not context.world.stop.is_set():
        time.sleep(0.01)
    return context.world.stop.number


@pytest.mark.parametrize("is_early", [True, False])
def test_a_request_reaches_them_before_they_start_and_while_they_run(is_early: bool):
    stop = StopRequest(waits_for_save=True)
    if is_early:
        stop.set(signal.SIGUSR1)
    assert spawn_workers(wait_for_request, 2, lambda rank, _: stop.set(signal.SIGUSR1), stop) == [signal.SIGUSR1] * 2


def test_what_a_listener_raises_ends_them():
    def refuse(rank: int, content: dict[str, int]) -> None:
        raise PolylaneError("the disk is full")

    with pytest.raises(PolylaneError, match="the disk is full"):
        spawn_workers(wait_for_request, 2, refuse)


def test_one_raises_while_the_other_waits():
    with pytest.raises(WorkerFailed, match="ValueError: the model is wrong") as caught:
        spawn_workers(raise_on_one, 2)
    assert caught.value.rank == 1


def test_one_is_killed():
    with pytest.raises(WorkerFailed, match="worker 1 failed: it was killed by SIGKILL"):
        spawn_workers(die_on_one, 2)


@pytest.mark.parametrize("waits", [True, False])
def test_one_leaves_without_a_word(waits: bool):
    """Whoever waits for it reports a lost peer, which is no cause."""
    with pytest.raises(WorkerFailed, match=r"worker 1 failed: it ended without a result \(exit code 0\)"):
        spawn_workers(partial(leave_on_one, waits), 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_all_leave_without_a_word(workers: int):
    with pytest.raises(WorkerFailed, match=r"worker \d failed: it ended without a result \(exit code 0\)"):
        spawn_workers(leave, workers)


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(PolylaneError, match="define it at the top of a module"):
        spawn_workers(lambda context: None, 2)


def return_length(content: bytes, context: WorkerContext) -> int:
    return len(content)


def test_a_function_that_would_fill_the_pipe_is_refused() -> None:
    assert spawn_workers(partial(return_length, bytes(10_000)), 1) == [10_000]
    with pytest.raises(PolylaneError, match=r"a function of 1,0\d\d,\d\d\d bytes .* have it load what is large"):
        spawn_workers(partial(return_length, os.urandom(1_000_000)), 1)


def stop_one(pages: dict[int, ProgressMemory], context: WorkerContext) -> None:
    prepared = compiled(mlp(6, 8, 4), build_objectives(classify, sgd, None), batch_of(8), "data=2")
    world = replace(context.world, progress=ProgressWriter(pages[context.rank], context.rank))
    job = Job(prepared, world, example=batch_of(8))
    for step in range(100_000):
        if context.rank == 1 and step == 5:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        job.step(batch_of(8))


def test_a_stopped_worker_is_named():
    kept, pages = list[HangReport](), {rank: ProgressMemory.allocate() for rank in range(2)}
    watch = HangWatch(pages, "stop", 0.6, kept.append)
    try:
        with pytest.raises(WorkerHung, match=r"rank 1 .* it is stopped .*; rank 0 waits for it"):
            spawn_workers(partial(stop_one, pages), 2, watch=watch.check)
    finally:
        watch.close()
    assert kept[0].culprits == (1,) and kept[0].ranks[1].stacks
