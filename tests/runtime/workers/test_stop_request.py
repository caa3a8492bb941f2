"""Stop requests: real signals to a launcher and to its workers, polled by the workers between their steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

import pytest

from polylane.runtime.workers.stop_request import (
    LauncherSignals,
    Stopped,
    StopRequest,
    describe_request,
    restore_signals,
)
from tests.support.workers import forked_commands
from tests.support.workers.child_processes import is_running

# A launcher whose workers do small steps, and save for as long as the first argument says once they are asked to end.
SCRIPT = """
    import os, sys, time, torch
    from polylane.runtime.workers.team import fork_workers
    from polylane.runtime.workers.stop_request import LauncherSignals, Stopped, StopRequest

    saving, grace, waits = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "waits"

    def worker(context):
        context.send_message({"pid": os.getpid()})
        while not context.world.stop.is_set():
            time.sleep(0.01)
        time.sleep(saving)
        return context.world.stop.number

    pids = []
    def listen(rank, content):
        pids.append(content["pid"])
        if len(pids) == 2:
            print(*pids, flush=True)

    def say(sentence):  # a signal may come in the midst of a print
        os.write(1, (sentence + "\\n").encode())

    stop = StopRequest(waits_for_save=waits)
    try:
        with LauncherSignals(stop, grace, say).handled():
            print(*fork_workers(worker, 2, listen, stop))
    except Stopped as stopped:
        print(stopped)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)
"""


@contextmanager
def launched(
    saving: float, grace: float, waits: bool = True, ignored: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    words = [str(saving), str(grace), "waits" if waits else "does not"]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *words]
    ignore = None if ignored is None else lambda: signal.signal(ignored, signal.SIG_IGN)
    process = forked_commands.start(command, start_new_session=True, preexec_fn=ignore)
    assert process.stdout is not None
    try:
        yield process, [int(pid) for pid in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate()


def ending(process: subprocess.Popen[str]) -> tuple[list[str], int]:
    out, err = process.communicate(timeout=20)
    assert err == ""
    return out.splitlines(), process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_workers_see_the_request_and_end_well(number: signal.Signals) -> None:
    with launched(saving=0, grace=20) as (process, _):
        process.send_signal(number)
        said = describe_request(number, 20)
        assert ending(process) == ([said, f"{number:d} {number:d}"], 0)


def test_a_signal_to_every_process_is_one_request() -> None:
    """As batch systems do."""
    with launched(saving=0.3, grace=20) as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
        assert ending(process) == ([describe_request(signal.SIGTERM, 20), "15 15"], 0)


def test_a_closed_terminal_tells_every_process_and_is_one_request() -> None:
    """A kernel that closes a terminal tells its whole foreground group, and the shell tells the launcher again."""
    with launched(saving=0.3, grace=20) as (process, _):
        os.killpg(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert ending(process) == ([describe_request(signal.SIGHUP, 20), "1 1"], 0)


def test_who_starts_it_with_nohup_wants_it_to_go_on() -> None:
    with launched(0, 20, ignored=signal.SIGHUP) as (process, workers):
        os.killpg(process.pid, signal.SIGHUP)
        os.kill(workers[0], signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert ending(process) == ([describe_request(signal.SIGTERM, 20), "15 15"], 0)


def test_a_limit_of_cpu_time_is_told_every_second_and_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polylane.runtime.workers.stop_request.SAME_REQUEST_SECONDS", 0.0)
    stop, said = StopRequest(waits_for_save=True), list[str]()
    with LauncherSignals(stop, 60, said.append).handled():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGXCPU)
            time.sleep(0.01)
    assert stop.number == signal.SIGXCPU and len(said) == 1


def test_what_a_worker_forks_outlives_the_terminal_and_no_other_signal() -> None:
    """A loader's processes are needed for the step that is under way, and torch ends them by SIGTERM."""

    def child() -> None:
        restore_signals()
        wait_forever()

    before = signal.getsignal(signal.SIGHUP)
    forked = get_context("fork").Process(target=child)
    forked.start()
    time.sleep(0.1)
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(forked.pid or 0, number)
    forked.join(10)
    assert forked.exitcode == -signal.SIGTERM and signal.getsignal(signal.SIGHUP) == before


def wait_forever() -> None:
    while True:
        time.sleep(1)


def test_a_signal_to_a_worker_is_the_launchers() -> None:
    with launched(saving=0, grace=20) as (process, workers):
        os.kill(workers[1], signal.SIGUSR1)
        assert ending(process) == ([describe_request(signal.SIGUSR1, 20), "10 10"], 0)


def test_the_grace_is_kept() -> None:
    with launched(saving=60, grace=0.3) as (process, workers):
        process.send_signal(signal.SIGTERM)
        lines, code = ending(process)
        assert lines[1:] == ["ended by SIGTERM: no checkpoint was complete within 0.3 s (--grace)"] and code == 143
        assert not any(is_running(pid) for pid in workers)


def test_a_second_ctrl_c_ends_at_once() -> None:
    with launched(saving=60, grace=60) as (process, workers):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline().startswith("Ctrl-C: saving a checkpoint")
        process.send_signal(signal.SIGINT)
        assert ending(process) == (["interrupted"], 130)
        assert not any(is_running(pid) for pid in workers)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGXCPU, 152), (signal.SIGHUP, 129)])
def test_without_checkpoints_the_end_comes_at_once(number: signal.Signals, code: int) -> None:
    with launched(saving=60, grace=60, waits=False) as (process, workers):
        process.send_signal(number)
        assert ending(process) == ([f"ended by {number.name}"], code)
        assert not any(is_running(pid) for pid in workers)


def test_a_second_request_later_on_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polylane.runtime.workers.stop_request.SAME_REQUEST_SECONDS", 0.0)
    said: list[str] = []
    stop = StopRequest(waits_for_save=True)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as caught, LauncherSignals(stop, 60, said.append).handled():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set() and len(said) == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(5)
    assert caught.value.exit_code == 138
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_is_no_worker_is_ended_by_its_own_signal() -> None:
    """The planner's copies of a model, or a pool of the recipe's: whoever forks them may end them so."""
    stop, said = StopRequest(waits_for_save=True), list[str]()
    with LauncherSignals(stop, 60, said.append).handled():
        is_there = get_context("fork").Event()
        forked = get_context("fork").Process(target=lambda: (is_there.set(), time.sleep(10)))
        forked.start()
        assert is_there.wait(10)
        forked.terminate()
        forked.join()
    assert forked.exitcode == -signal.SIGTERM and not stop.is_set() and not said


def test_a_worker_that_is_added_after_a_request_gets_it() -> None:
    reading, writing = os.pipe()
    stop = StopRequest()
    stop.set(signal.SIGTERM)
    stop.add_worker(writing)
    assert os.read(reading, 8) == bytes([signal.SIGTERM])
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_polling_is_cheap() -> None:
    stop, start = StopRequest(), time.perf_counter()
    for _ in range(10_000):
        stop.is_set()
    assert time.perf_counter() - start < 0.1


def test_no_thread_is_started_in_a_signals_handler_and_the_alarm_is_given_back() -> None:
    stop, before = StopRequest(waits_for_save=True), signal.getsignal(signal.SIGALRM)
    with LauncherSignals(stop, 60, lambda sentence: None).handled():
        threads = threading.active_count()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set() and threading.active_count() == threads
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_the_grace_ends_where_nobody_looks(grace: float) -> None:
    stop = StopRequest(waits_for_save=True)
    with pytest.raises(Stopped) as caught, LauncherSignals(stop, grace, lambda sentence: None).handled():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)
    assert str(caught.value) == f"ended by SIGUSR1: no checkpoint was complete within {grace:g} s (--grace)"


def test_a_second_ctrl_c_while_the_first_is_received_ends_at_once() -> None:
    class Interrupted(StopRequest):
        def set(self, number: int) -> None:
            super().set(number)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Stopped), LauncherSignals(Interrupted(waits_for_save=True), 60, print).handled():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGALRM) == before
