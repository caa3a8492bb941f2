"""A worker that does not go on is named: which one, what it does, at which line; all workers end, nothing is left."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.diagnosis import patience, report
from polylane.diagnosis.page_layout import Phase
from polylane.diagnosis.report import Doing, HangReport
from polylane.errors import WorkerHung
from polylane.runtime.job import Job
from polylane.runtime.progress.watch import HangWatch, OnHang
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.support.recipes.hanging_worker import RECIPE
from tests.support.workers.child_processes import children
from tests.support.workers.forked_commands import run
from tests.support.workers.training import batch_of, classify, compiled, mlp, sgd

BOUND = 0.6  # seconds without progress; the steps of these models take some milliseconds


@pytest.fixture(autouse=True)
def nothing_is_left():
    fork_workers(lambda context: None, 1)
    before, others = len(os.listdir("/proc/self/fd")), children()
    yield
    assert children() <= others
    assert len(os.listdir("/proc/self/fd")) <= before


def watched(
    work: Callable[[Job, int], Any],
    model: nn.Module,
    plan: str,
    on_hang: OnHang = "stop",
    bound: float | None = BOUND,
    said: list[str] | None = None,
) -> tuple[list[HangReport], Exception | None]:
    """Reports of a training in which every worker does ``work(job, rank)``, and what ended it."""
    prepared = compiled(model, build_objectives(classify, sgd, None), batch_of(8), plan)
    kept, said = list[HangReport](), [] if said is None else said
    pages = {rank: ProgressMemory.allocate() for rank in range(prepared.plan.processes)}
    watch = HangWatch(pages, on_hang, bound, kept.append, said.append)

    def run_worker(context: WorkerContext) -> None:
        progress = ProgressWriter(pages[context.rank], context.rank)
        with Job(prepared, replace(context.world, progress=progress), example=batch_of(8)) as job:
            progress.enter(Phase.TRAINING)
            work(job, context.rank)

    try:
        fork_workers(run_worker, prepared.plan.processes, watch=watch.check)
    except WorkerHung as error:
        return kept, error
    finally:
        watch.close()
    return kept, None


def stop_later(steps: int, culprit: int) -> Callable[[Job, int], None]:
    """Steps in which one rank is stopped by another thread at some moment."""

    def work(job: Job, rank: int) -> None:
        for step in range(steps):
            if rank == culprit and step == 5:
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            job.step(batch_of(8))

    return work


PLANS = ["data=2", "pipeline=2,microbatches=2", "tensor=2", "data=2,servers=2"]


@pytest.mark.parametrize(
    ("plan", "transport"),
    [
        *((plan, "shared_memory") for plan in PLANS[:2]),
        *(pytest.param(plan, "shared_memory", marks=pytest.mark.slow) for plan in PLANS[2:]),
        *(pytest.param(plan, "gloo", marks=pytest.mark.slow) for plan in PLANS),
    ],
)
def test_a_stopped_worker_is_named(plan: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYLANE_TRANSPORT", transport)
    culprit = len(plan) % 2
    begun = time.monotonic()
    kept, error = watched(stop_later(100_000, culprit), mlp(6, 8, 8, 4), plan)
    assert isinstance(error, WorkerHung) and error.rank == culprit, error
    assert time.monotonic() - begun < 10
    (told,) = kept
    assert told.culprits == (culprit,)
    assert told.ranks[culprit].doing is Doing.STOPPED
    assert told.ranks[culprit].stacks
    assert f"rank {1 - culprit} waits for it" in str(error)
    assert f"kill -CONT {told.ranks[culprit].pid}" in str(error)


class Own(nn.Module):
    """A module that no capture sees through, which does something at its hundredth call on one rank."""

    def __init__(self, then: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(8, 8), then

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum().item() > 1e30:
            return y * 0
        if _calls.setdefault("rank", -1) == 1:
            _calls["count"] = _calls.get("count", 0) + 1
            if _calls["count"] == 10:
                self.then()
        return y


_calls: dict[str, int] = {}


def loop_for_ever() -> None:
    while True:
        time.sleep(0.001)  # the line


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)  # a foreign call that keeps the interpreter's lock


def run_own(job: Job, rank: int) -> None:
    _calls.update(rank=rank, count=0)
    for _ in range(1000):
        job.step(batch_of(8))


def test_a_loop_in_the_users_forward_is_named_by_its_line() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Own(loop_for_ever), nn.Linear(8, 4)).double()
    (told,), error = watched(run_own, model, "data=2")
    lines, first = inspect.getsourcelines(loop_for_ever)
    line = first + next(number for number, text in enumerate(lines) if "the line" in text)
    assert isinstance(error, WorkerHung) and error.rank == 1
    assert told.ranks[1].doing is Doing.IN_USER_CODE
    assert told.ranks[1].source == f"test_hangs.py:{line}"
    assert "at loop_for_ever (test_hangs.py" in str(error)
    assert told.ranks[1].action is not None and told.ranks[1].action.microbatch == 0


@pytest.mark.parametrize("phase", ["saving", pytest.param("training", marks=pytest.mark.slow)])
def test_who_holds_the_interpreters_lock_is_named_in_every_phase(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BEATS_LATE_SECONDS", 0.8)

    def work(job: Job, rank: int) -> None:
        for step in range(1000):
            if phase == "saving" and rank == 1 and step == 5:
                with job.world.progress.during(Phase.SAVING):
                    hold_the_interpreter()
            job.step(batch_of(8))

    model = nn.Sequential(nn.Linear(6, 8), Own(hold_the_interpreter), nn.Linear(8, 4)).double()
    (told,), error = watched(run_own if phase == "training" else work, model, "data=2", bound=1.0)
    assert isinstance(error, WorkerHung) and error.rank == 1
    assert told.ranks[1].doing is Doing.HOLDS_INTERPRETER and told.ranks[1].phase == phase
    assert "hold_the_interpreter (test_hangs.py" in str(error)


def test_a_slow_loader_is_no_hang_and_is_said_to_be_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "MARGIN_SECONDS", BOUND)

    def work(job: Job, rank: int) -> None:
        def batches() -> Any:
            for number in range(6):
                if rank == 1 and number == 4:
                    time.sleep(1.5)
                yield batch_of(8)

        for batch in job.world.progress.loading(batches()):
            job.step(batch)

    said: list[str] = []
    kept, error = watched(work, mlp(6, 8, 4), "data=2", bound=None, said=said)
    assert (kept, error) == ([], None)
    (sentence,) = said
    assert sentence.startswith("rank 1 ") and "it is in its loader; rank 0 waits for it" in sentence
    assert "at batches (test_hangs.py" in sentence


def test_a_users_bound_holds_in_the_loader() -> None:
    def work(job: Job, rank: int) -> None:
        for batch in job.batches(_Samples(rank == 1), 8):
            job.step(batch)

    (told,), error = watched(work, mlp(6, 8, 4), "data=2")
    assert isinstance(error, WorkerHung) and error.rank == 1
    assert told.ranks[1].doing is Doing.LOADING and told.ranks[1].operator == "loop_for_ever"


class _Samples:
    """Samples, of which the hundredth never comes."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.count = ends, 0

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        if self.ends and self.count == 100:
            loop_for_ever()
        inputs, targets = batch_of(8)
        return inputs[0], targets[0]


@pytest.mark.slow
def test_who_waits_is_told_when_a_stopped_worker_goes_on() -> None:
    def work(job: Job, rank: int) -> None:
        for step in range(20):
            if rank == 1 and step == 10:
                pid = os.getpid()
                if os.fork() == 0:
                    time.sleep(2.5)
                    os.kill(pid, signal.SIGCONT)
                    os._exit(0)
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.06 if step > 10 else 0)  # so that the training does not end before anybody looks
            job.step(batch_of(8))

    said: list[str] = []
    kept, error = watched(work, mlp(6, 8, 4), "data=2", on_hang="wait", said=said)
    assert error is None and len(kept) == 1 and kept[0].culprits == (1,)
    assert "is stopped" in said[0] and "the training waits for it" in said[0]
    assert said[1].startswith("rank 1 makes progress again after ")


@pytest.mark.slow
def test_a_long_first_step_is_no_hang() -> None:
    def work(job: Job, rank: int) -> None:
        _calls.update(rank=rank, count=9)
        job.step(batch_of(8))

    model = nn.Sequential(nn.Linear(6, 8), Own(lambda: time.sleep(1.5)), nn.Linear(8, 4)).double()
    said: list[str] = []
    kept, error = watched(work, model, "data=2", said=said)
    assert (kept, error) == ([], None)
    assert len(said) == 1 and "no hang yet: the run ends after 9.5 min" in said[0]


@pytest.mark.slow
def test_workers_that_take_long_in_one_place_are_told_of_at_once() -> None:
    def work(job: Job, rank: int) -> None:
        for step in range(6):
            if step == 4:
                with job.world.progress.during(Phase.COMPILING):
                    time.sleep(2.0)
            job.step(batch_of(8))

    said: list[str] = []
    kept, error = watched(work, mlp(6, 8, 4), "data=2", said=said)
    assert (kept, error) == ([], None)
    assert len(said) == 1, said
    assert re.search(r"^rank (0|1) .*; so does rank (1|0) \(this takes long, and is no hang yet", said[0])


@pytest.mark.slow
def test_the_command_keeps_a_hang_and_a_failure_and_why_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs.py").write_text(RECIPE)
    for code, said in (("SIGSTOP", "it is stopped"), ("SIGKILL", "it was killed by SIGKILL")):
        options = f"--plan data=2 --batch 8 --run {code} --hang-after 1 --set fault={code}".split()
        failed = run([sys.executable, "-m", "polylane", "train", "logs.py", *options])
        assert failed.returncode == 1 and said in failed.stderr
        told = run([sys.executable, "-m", "polylane", "why", code], check=True)
        assert said in told.stdout and "rank 1 · stage 0 │" in told.stdout
        assert "!" in told.stdout.partition("rank 1 · stage 0 │")[2].partition("\n")[0]
