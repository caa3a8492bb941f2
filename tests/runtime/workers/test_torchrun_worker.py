"""A worker of torchrun handles its own signals, also while its main thread waits in native code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polylane.runtime.workers.stop_request import describe_request
from tests.support.workers import forked_commands

# The main thread waits for a mutex that it holds: no signal handler of Python's would ever run there.
SCRIPT = """
    import ctypes, sys, time
    from polylane.runtime.workers.launch_environment import Launch
    from polylane.runtime.workers.stop_request import StopRequest
    from polylane.runtime.workers.torchrun_worker import TorchrunWorker

    stop = StopRequest(waits_for_save=sys.argv[1] == "waits")
    signals = TorchrunWorker(Launch(True), stop, float(sys.argv[2]), lambda number: "so much is kept").handled()
    signals.__enter__()
    print("ready", flush=True)
    if sys.argv[3] == "stuck":
        mutex = ctypes.create_string_buffer(256)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    while not stop.is_set():
        time.sleep(0.01)
    print("asked by", stop.number)
"""


@contextmanager
def worker(*words: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    process = forked_commands.start([sys.executable, "-c", textwrap.dedent(SCRIPT), *words], env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_is_seen(number: signal.Signals) -> None:
    with worker("waits", "30", "free") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, f"asked by {number:d}\n")
    assert err == f"polylane: {describe_request(number, 30)}\n"


@pytest.mark.parametrize("state", ["free", "stuck"])
def test_without_checkpoints_the_end_comes_at_once(state: str) -> None:
    with worker("does not", "30", state) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=10) == ("", "polylane: ended by SIGUSR1: so much is kept\n")
    assert process.returncode == 138


def test_the_grace_is_kept() -> None:
    with worker("waits", "0.2", "stuck") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert err.splitlines()[1] == "polylane: ended by SIGTERM: no checkpoint was complete within 0.2 s (--grace)"
