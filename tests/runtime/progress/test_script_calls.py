"""Workers of a script that make different calls are all told so, and raise it, wherever they wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from polylane.diagnosis import judgement
from polylane.errors import CallsDiffer, MessageUnreadable, PeerLost
from polylane.runtime.progress.page_reader import PageReader
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.progress.watch import HangWatch, OnHang
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter

Script = Callable[["Worker"], None]


class Worker:
    """A worker that is in calls, with nobody to meet in them."""

    def __init__(self, progress: ProgressWriter) -> None:
        self.progress, self.world = progress, self
        self.line = progress.add_line("0: 0, 1", (0, 1))

    @collective("job.step")
    def step(self) -> None:
        self.progress.begin_operation(1)

    @collective("job.step")
    def step_for_ever(self) -> None:
        self._wait()

    @collective("job.save")
    def save(self) -> None:
        self._wait()

    @collective("job.load")
    def refuse(self) -> None:
        raise FileNotFoundError

    @collective("job.step")
    def lose_the_other(self) -> None:
        raise self.progress.explain(PeerLost(0, "summing", "closed"))

    @collective("job.step")
    def misread_the_other(self) -> None:
        raise MessageUnreadable("from another version")

    def _wait(self) -> None:
        self.progress.begin_wait(1, self.progress.begin_operation(1))
        time.sleep(60)


@contextmanager
def running(*scripts: Script) -> Iterator[dict[int, ProgressMemory]]:
    """A process for each script, which has exit status 7 if calls differ, and 3 if only its peer is lost."""
    memories, pids = {rank: ProgressMemory.allocate() for rank in range(len(scripts))}, list[int]()
    for rank, script in enumerate(scripts):
        if not (pid := os.fork()):
            try:
                worker = Worker(ProgressWriter(memories[rank], rank, is_script=True))
                script(worker)
                worker.progress.calls.leave()  # type: ignore[union-attr]
                time.sleep(60)
            except CallsDiffer:
                os._exit(7)
            except PeerLost:
                os._exit(3)
            except MessageUnreadable:
                os._exit(1)
            os._exit(1)
        pids.append(pid)
    try:
        yield memories
        assert {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[-1:]} <= {3, 7}
    finally:
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def look(memories: dict[int, ProgressMemory], on_hang: OnHang = "stop", seconds: float = 20.0) -> tuple[str, list[str]]:
    """Look at workers until their calls differ, or something was said."""
    said = list[str]()
    watch, end = HangWatch(memories, on_hang, None, lambda report: None, said.append), time.monotonic() + seconds
    while time.monotonic() < end and not said:
        try:
            watch.look()
        except CallsDiffer as error:
            return str(error), said
        time.sleep(0.05)
    return "", said


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "PARTING_SECONDS", 0.3)
    monkeypatch.setattr("polylane.runtime.progress.watch.PARTING_SECONDS", 0.3)


def step_and_save(worker: Worker) -> None:
    worker.step()
    worker.save()


def step_for_ever(worker: Worker) -> None:
    worker.step()
    worker.step_for_ever()


def lose(worker: Worker) -> None:
    worker.step()
    worker.lose_the_other()


def misread(worker: Worker) -> None:
    worker.step()
    worker.misread_the_other()


def refuse_first(worker: Worker) -> None:
    with suppress(FileNotFoundError):
        worker.refuse()
    worker.step()
    worker.save()


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (step_and_save, "rank 0 is in job.save"),
        (lambda worker: worker.step(), "rank 0 left the script after job.step"),
    ],
    ids=["another-method", "left"],
)
@pytest.mark.parametrize("second", [step_for_ever, lose, misread])
def test_who_waits_or_loses_another_raises_what_each_is_in(first: Script, second: Script, said: str) -> None:
    with running(first, second) as memories:
        found, _ = look(memories)
        assert found.startswith(said) and "rank 1 is in job.step" in found.replace(", rank 1 in", ", rank 1 is in")
        assert found.count("test_script_calls.py line ") >= 2


def test_who_waits_as_told_is_left_alone() -> None:
    with running(step_and_save, step_for_ever) as memories:
        found, (said, *_) = look(memories, "wait")
        assert not found and said.endswith("the training waits, as it is to (on hang: wait)")
        PageReader(1, memories[1]).tell_parting(said, False)


def test_a_call_that_is_refused_on_one_rank_is_none() -> None:
    with running(refuse_first, step_and_save) as memories:
        assert look(memories, seconds=1.0)[0] == ""
        PageReader(1, memories[1]).tell_parting("told by the test", False)
