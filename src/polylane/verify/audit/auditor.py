"""Auditor: a process beside rank 0 that replays audited steps by the user's own code, while the training goes on.

It is forked before the training takes the model apart, and so has all of the user's Python as it was built: model,
loss, optimizer, data set, hooks, globals. Where this process has an accelerator autograd could not go backward in a
fork; a training that can be loaded again (a recipe) is replayed there by a new process, which has no accelerator.
See :mod:`polylane.verify.audit.auditor_process` for what it does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.workers.launch_environment import VARIABLES
from polylane.verify.audit.auditor_process import AuditedTraining, StepOrder, run_auditor
from polylane.verify.audit.step_replay import StepVerdict

Build = Callable[[], AuditedTraining]

AUDITOR_MODULE = run_auditor.__module__
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # what hides accelerators


def fork_auditor(training: AuditedTraining, boards: tuple[int, int]) -> Auditor:
    """Start an auditor as a fork of this process, which has gone backward on no accelerator.

    Args:
        training: what it has of the training.
        boards: descriptors of the memory that holds the state before an audited step, and of that after it.

    Raises:
        OSError: the system has no process left.
    """
    (orders, child_orders), parent = multiprocessing.Pipe(), os.getpid()
    for stream in (sys.stdout, sys.stderr):  # else the child has a copy of what was not written yet
        with suppress(Exception):
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child starts none
        child = os.fork()
    if child == 0:
        try:
            orders.close()
            run_auditor(lambda: training, boards, child_orders, parent)
        finally:
            os._exit(1)
    child_orders.close()
    return Auditor(orders, child)


def spawn_auditor(build: Build, boards: tuple[int, int]) -> Auditor:
    """Start an auditor as a new process, which builds the training and sees no accelerator.

    Args:
        build: picklable function that returns what it has of the training.
        boards: descriptors of the memory of states, before and after an audited step.

    Raises:
        OSError: the system has no process left.
    """
    (orders, child_orders), parent = multiprocessing.Pipe(), os.getpid()
    content = pickle.dumps(build)
    environment = {name: text for name, text in os.environ.items() if name not in VARIABLES}
    environment |= dict.fromkeys(_DEVICES, "")
    # The modules that this process finds, and no others that lie in the current folder.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    program = f"import {AUDITOR_MODULE} as auditor; auditor.run_new_process()"
    words = [sys.executable, "-P", "-c", program]
    actions: Sequence[tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)
    ]
    descriptors = list[int]()
    try:
        for descriptor in (child_orders.fileno(), *boards):
            descriptors.append(os.dup(descriptor))
            os.set_inheritable(descriptors[-1], True)
        words += map(str, (parent, *descriptors))
        child = os.posix_spawn(sys.executable, words, environment, file_actions=actions)
    finally:
        child_orders.close()
        for descriptor in descriptors:
            os.close(descriptor)
    with suppress(OSError):  # it has died, which the first look at it finds
        orders.send_bytes(content)
    return Auditor(orders, child)


class Auditor:
    """The process of rank 0 that replays steps, seen from rank 0.

    Args:
        orders: connection to the auditor's process.
        process: number of that process.

    Attributes:
        is_busy: whether it has an order whose verdict has not been read.
    """

    def __init__(self, orders: Connection, process: int) -> None:
        self._orders, self.is_busy, self._step = orders, False, 0
        self._process: int | None = process  # None once it was waited for: its number may be another process's then
        # A training that nobody closes is let go of as well.
        self._end = weakref.finalize(self, _end_process, process, os.getpid())

    def send(self, order: StepOrder) -> None:
        """Have a step replayed; nothing is done where the process has died, which :meth:`poll` finds."""
        self.is_busy, self._step = True, order.step + 1
        with suppress(OSError):
            self._orders.send_bytes(encode(order))

    def poll(self, seconds: float) -> StepVerdict | None:
        """Return the verdict on the step that was sent; None if it takes longer.

        Args:
            seconds: bound on the waiting.
        """
        try:
            if not self._orders.poll(seconds):
                return None
            verdict = decode(self._orders.recv_bytes())
        except (EOFError, OSError):
            verdict = StepVerdict(self._step, refusal=f"the process {self._describe_end()}")
        self.is_busy = False
        assert isinstance(verdict, StepVerdict)
        return verdict

    def _describe_end(self) -> str:
        if (status := self._wait()) is not None and os.WIFSIGNALED(status):
            return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return "has ended"

    def _wait(self) -> int | None:
        """Wait for the process, which has ended or is about to; return how it ended, None if that is not known."""
        status = None
        with suppress(ChildProcessError):  # the script waits for all its children itself
            status = None if self._process is None else os.waitpid(self._process, 0)[1]
        self._process = None
        self._end.detach()
        return status

    def close(self) -> None:
        """End the process; what it is replaying is left unfinished."""
        with suppress(OSError):
            self._orders.close()
        self._process = None
        self._end()


def _end_process(child: int, parent: int) -> None:
    """Kill the auditor and wait for it; nothing is done in another process than the one that started it."""
    if os.getpid() == parent:
        with suppress(ProcessLookupError, ChildProcessError):  # the script waits for all its children itself
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
