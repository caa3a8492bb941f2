"""Tie of a worker to the process that started it: no worker trains on when nobody waits for it any more."""

from __future__ import annotations

import os
import signal

from polylane.parent_death import die_with_parent, read_status
from polylane.runtime.workers.stop_request import STOP_SIGNALS, StopRequest, handle_in_worker

# Blocked in this thread while workers are started or ended. Another thread may still receive one, whose handler Python
# runs in the main thread: a worker that is added later gets the request then.
INTERRUPTS = frozenset((signal.SIGINT, signal.SIGALRM, *STOP_SIGNALS))  # SIGALRM: the end of a grace


def tie_to_parent(parent: int, stop: StopRequest | None = None) -> None:
    """Tie this process to its parent: killed when that dies (on Linux), ignoring Ctrl-C; see also `handle_in_worker`.

    Args:
        parent: process id of the process that started this one.
        stop: the request that both follow; None: a stop signal ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle_in_worker(stop or StopRequest(), parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    die_with_parent(parent)


def tie_to_agent() -> int | None:
    """Have the system kill this process when torchrun's agent dies, if that is its parent; return the agent's id.

    The agent starts each worker in a session of its own: the session's leader is this process, or a wrapper. Who is
    started by something else may have a parent that rightly ends before it does.

    Returns:
        The process id of the agent; None for a process that none has started.
    """
    leader = os.getsid(0)
    status = read_status(leader)  # its second field is the parent
    agent = os.getppid() if leader == os.getpid() else int(status[1]) if status else 0
    if "TORCHELASTIC_RUN_ID" not in os.environ or agent <= 1:
        return None
    if leader == os.getpid():
        die_with_parent(agent)
    return agent
