"""Tie of a worker to the process that started it: no worker trains on when nobody waits for it any more."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from polylane.runtime.workers.stop_request import STOP_SIGNALS, StopRequest, handle_in_worker

_PR_SET_PDEATHSIG = 1

# Blocked while workers are forked or ended, so that none is forgotten.
INTERRUPTS = frozenset((signal.SIGINT, *STOP_SIGNALS))


def tie_to_parent(parent: int, stop: StopRequest | None = None, under_agent: bool = False) -> None:
    """Tie this process to its parent: killed when that dies (on Linux), ignoring Ctrl-C; see also `handle_in_worker`.

    Args:
        parent: process id of the process that started this one.
        stop: the request that both share; None: a stop signal ends this process.
        under_agent: whether the parent is torch's agent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle_in_worker(stop or StopRequest(), parent, under_agent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    die_with_parent(parent)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies (on Linux); end it if that has died already.

    Args:
        parent: process id of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl took effect
        os._exit(1)
