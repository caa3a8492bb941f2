"""A worker that fails in the midst of a step ends the job: soon, with one message that says where, and nothing left."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError, WorkerFailed
from polylane.runtime.job import Job
from polylane.runtime.workers import team
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets
from tests.support.workers.child_processes import children
from tests.support.workers.training import batch_of, mlp, workers

SECONDS = 10  # the promise; it takes well under one
PLANS = ["data=2", "pipeline=2,microbatches=3", "data=2,pipeline=2,microbatches=3"]


@pytest.fixture(autouse=True)
def nothing_is_left():
    fork_workers(lambda context: None, 1)
    before, others = len(os.listdir("/proc/self/fd")), children()
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS
    assert children() <= others  # neither running children nor zombies
    assert len(os.listdir("/proc/self/fd")) <= before


POISON = 13.0  # a sample whose first feature is this makes an operator raise


class Fragile(torch.autograd.Function):
    """The identity, until a poisoned sample comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor, backward: bool) -> Tensor:
        ctx.save_for_backward(marks)
        ctx.backward = backward
        if not backward and bool((marks == POISON).any()):
            raise ArithmeticError("poisoned on the way forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (marks,) = ctx.saved_tensors
        if ctx.backward and bool((marks == POISON).any()):
            raise ArithmeticError("poisoned on the way back")
        return gradients[0], None, None


class Gate(nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward_too = backward

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        return Fragile.apply(x, marks, self.backward_too)  # the line at fault


class Model(nn.Module):
    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), Gate(backward), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.gate(self.first(x), x[:, 0])))


def poisoned(samples: int, at: int) -> tuple[Tensor, Tensor]:
    inputs, labels = batch_of(samples)
    inputs[at, 0] = POISON
    return inputs, labels


def failure_of(work: Callable[[Job], Any], model: nn.Module, plan: str, **options: Any) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        workers(work, model, plan, **options)
    return caught.value


@pytest.mark.parametrize("backward", subsets.one_in(2, [False, True]), ids=["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS)
def test_an_operator_that_raises_once(plan: str, backward: bool) -> None:
    """Sample 4 of 9 lies in microbatch 1 of 3; with two replicas (2 and 1 samples of it), on the first one's part."""

    def work(job: Job) -> None:
        job.step(batch_of(9))
        job.step(poisoned(9, 4))

    torch.manual_seed(0)
    error = failure_of(work, Model(backward).double(), f"{plan},per_sample=gate", example=batch_of(9))
    assert (error.error_type, error.error_message) == (
        "ArithmeticError",
        f"poisoned on the way {'back' if backward else 'forward'}",
    )
    microbatch = 1 if "microbatches" in plan else 0
    assert error.microbatch == microbatch and error.stage in (0, 1)
    assert error.rank == error.stage if "pipeline" in plan else error.rank == 0
    assert error.module == "gate"
    assert error.source is not None and "test_failures.py" in error.source
    text = str(error)
    assert text.startswith(f"worker {error.rank} failed at stage {error.stage}, microbatch {microbatch}, in gate (")
    assert text.count("Traceback (most recent call last)") == 1
    assert f"in {'backward' if backward else 'forward'}" in text and "raise ArithmeticError" in text


def test_a_dataset_that_raises() -> None:
    class Torn(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 7:
                raise OSError("sample 7 cannot be read")
            inputs, labels = batch_of(12)
            return inputs[index], labels[index]

    def work(job: Job, loaders: int) -> None:
        for batch in job.batches(Torn(), 4, workers=loaders):
            job.step(batch)

    told = r"batch \d of epoch 1: sample 7 of the dataset raised OSError: sample 7 cannot be read \(.*test_failures.py"
    for loaders in (0, 1):
        with pytest.raises(PolylaneError, match=told):
            workers(lambda job, n=loaders: work(job, n), mlp(6, 8, 4), "data=2", example=batch_of(4))


def test_an_optimizer_that_raises() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(p.shape == (4, 8) for group in self.param_groups for p in group["params"]):
                raise ArithmeticError("not this weight")
            return super().step(closure)

    sentence = r"^optimizer\.step\(\) raised ArithmeticError: not this weight \(.*test_failures\.py:\d+\)$"
    for plan in ("pipeline=2,microbatches=2", "data=2,pipeline=2,microbatches=2"):
        with pytest.raises(PolylaneError, match=sentence):
            workers(
                lambda job: job.step(batch_of(8)),
                mlp(6, 512, 512, 8, 4),
                plan,
                optimizer=lambda named: Refusing(list(named), lr=0.1),
            )


def test_a_label_past_the_classes_is_one_sentence() -> None:
    def work(job: Job) -> None:
        inputs, labels = batch_of(8)
        labels[5] = 99  # no such class
        job.step((inputs, labels))

    place = {"pipeline=2,microbatches=2": "stage 1, microbatch 1", "tensor=2": "stage 0, microbatch 0"}
    for plan, where in place.items():
        told = (
            rf"step 1: a number of the batch is past .* at {where}, in loss \(.*training.py:.* 99 is out of bounds; see"
        )
        with pytest.raises(PolylaneError, match=told):
            workers(work, mlp(6, 8, 4), plan, example=batch_of(8))


def test_evaluation_that_raises() -> None:
    def work(job: Job) -> None:
        job.evaluate(batch_of(9))
        job.evaluate(poisoned(9, 8))

    torch.manual_seed(0)
    error = failure_of(
        work,
        Model(False).double(),
        "data=2,pipeline=2,microbatches=3,per_sample=gate",
        example=batch_of(9),
        evaluates=True,
    )
    assert (error.microbatch, error.module) == (2, "gate")


def test_bad_input_stays_bad_input() -> None:
    """What is the user's to mend is a PolylaneError, also when one worker alone notices."""

    def work(job: Job) -> None:
        if job.world.rank == 1:
            raise PolylaneError("no such file")
        job.step(batch_of(8))

    with pytest.raises(PolylaneError, match=r"^no such file$"):
        workers(work, mlp(6, 8, 4), "data=2")


def test_a_worker_that_is_killed() -> None:
    def work(job: Job) -> None:
        job.step(batch_of(8))
        if job.world.rank == 1:
            os.kill(os.getpid(), 9)
        job.step(batch_of(8)).loss  # noqa: B018

    error = failure_of(work, mlp(6, 8, 4), "pipeline=2,microbatches=2")
    assert (error.rank, error.error_type) == (1, "SIGKILL")


def test_leaving_the_job_by_an_exception_does_not_hang() -> None:
    """The context manager does not wait for peers that will never answer."""

    def work(job: Job) -> None:
        if job.world.rank == 0:
            job.step(batch_of(8))
        else:
            raise KeyError("gone")

    assert failure_of(work, mlp(6, 8, 4), "data=2").error_type == "KeyError"


# Processes that cannot be ended, or whose end nobody can see ---------------------------------------------------------


def raise_in_one(context: WorkerContext) -> None:
    if context.rank == 0:
        raise ArithmeticError("no number")
    time.sleep(60)


def test_a_worker_that_cannot_be_killed_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A frozen cgroup, or a dead file server: the system carries the signal out when it lets go of the process."""
    pids = []
    for name in ("kill", "terminate"):
        monkeypatch.setattr(ForkProcess, name, lambda self: pids.append(self.pid))
    for name in ("TERM_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(team, name, 0.1)
    before, start = set(multiprocessing.active_children()), time.monotonic()
    try:
        with pytest.raises(WorkerFailed, match="no number"):
            fork_workers(raise_in_one, 2)
        assert time.monotonic() - start < 5
        said = capfd.readouterr().err
        assert re.match(
            rf"polylane: worker 1 \(process {pids[-1]}\) does not end after SIGKILL: the system holds it", said
        )
        assert set(multiprocessing.active_children()) <= before  # the interpreter's exit waits for these
    finally:
        os.kill(pids[-1], signal.SIGKILL)
        os.waitpid(pids[-1], 0)


def reap_all(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.mark.parametrize("handler", [signal.SIG_IGN, reap_all], ids=["ignored", "reaped"])
def test_a_worker_whose_exit_code_somebody_else_took(handler: Any) -> None:
    """SIGCHLD ignored, by the shell or the recipe, or a handler that waits for whatever child has ended."""
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert fork_workers(lambda context: context.rank, 2) == [0, 1]
        assert signal.getsignal(signal.SIGCHLD) == handler  # as the caller has left it
        with pytest.raises(WorkerFailed, match=r"worker 1 failed: it (was killed by SIGKILL|ended, and how could)"):
            fork_workers(die_in_one, 2)
        assert signal.getsignal(signal.SIGCHLD) == handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def die_in_one(context: WorkerContext) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
