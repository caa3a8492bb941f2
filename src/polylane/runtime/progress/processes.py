"""Processes: their state, and their stacks on demand, as seen from another process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from polylane.runtime.progress_page import STACK_SIGNAL

ANSWER_SECONDS = 1.0  # wait for a process to write its stacks
MOST_BYTES = 20_000  # of one process's stacks that are kept


def read_state(pid: int) -> str:
    """Return the letter of a process's state (R, S, D, T, t, Z); "" without such a process, "S" without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else "S"
    except OSError:  # it ended while it was read
        return ""
    return text.rpartition(")")[2].split()[0]


def request_stacks(pid: int, continues: bool) -> None:
    """Ask a worker to write its stacks; one that is stopped does so only if it is to continue.

    Args:
        pid: the worker's process, whose handler of the signal is installed.
        continues: whether to continue it if it is stopped; the signal comes before whatever it would do next.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACK_SIGNAL)
        if continues:
            os.kill(pid, signal.SIGCONT)


def read_stacks(pid: int, file: int, start: int) -> str:
    """Return what a worker has written since a position of its file; else what py-spy sees, if that is installed."""
    deadline, size = time.monotonic() + ANSWER_SECONDS, start
    while time.monotonic() < deadline:
        new_size = os.fstat(file).st_size
        if new_size > start and new_size == size:
            break
        size = new_size
        time.sleep(0.02)
    if size > start:
        return os.pread(file, min(size - start, MOST_BYTES), start).decode(errors="replace")
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        # Whole names of files: of shortened ones nobody could say whether they are the user's.
        command = [spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout[:MOST_BYTES]
    return ""
