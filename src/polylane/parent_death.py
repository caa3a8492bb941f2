"""Processes: what the system says of them, and one that it ends with the one that started it (both by Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies, even a stopped one; end it if that has died already.

    Args:
        parent: process id of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)


def read_status(pid: int) -> list[str]:
    """Return the fields of a process in /proc from its state on; empty where there are none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
