"""Stop request: a signal that asks a training to end, as a number that every worker polls.

    what arrives               without checkpoints          with checkpoints
    one of STOP_SIGNALS        the run ends at once         a request: the workers save, and end within the grace
    Ctrl-C                     the run ends at once         the same
    a second one               -                            the run ends at once
    the grace is over          -                            the run ends at once

Who receives the signal depends on the launcher. Workers that a process of this host started get its number from that
process, over their lifelines (:mod:`.started_worker`); of torchrun's workers each has a handler of its own
(:mod:`.torchrun_worker`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from polylane.errors import Interruption

GRACE = 30.0  # default of seconds from a request to the end

# What ends a process by itself, and comes from batch systems before they kill (SIGTERM, SIGUSR1, SIGUSR2), from the
# system at a limit of CPU time (SIGXCPU), and from a terminal that is closed (SIGHUP).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP)

# The signals of one request: a batch system may send one to the launcher and to all workers, and these pass it on.
SAME_REQUEST_SECONDS = 1.0


class Stopped(Interruption):
    """A signal has ended the run before its training was done.

    Args:
        number: number of the signal, such as 15.
        reason: what is said beside the signal's name; empty for nothing.
    """

    def __init__(self, number: int, reason: str = "") -> None:
        self.number = number
        self.reason = reason
        super().__init__(number, reason)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that the signal ended, as shells count."""
        return 128 + self.number

    def __str__(self) -> str:
        return describe_end(self.number) + (f": {self.reason}" if self.reason else "")


def list_heeded() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore: who starts it with nohup wants it to go on."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def describe_end(number: int) -> str:
    """Describe that a signal has ended the run."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def describe_request(number: int, grace: float) -> str:
    """Describe what a first signal has asked for.

    Args:
        number: number of the signal, such as 15.
        grace: seconds until the run is ended.
    """
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return (
        f"{name}: saving a checkpoint after this step, then the training ends; after {grace:g} s (--grace), or at a "
        "second signal, it ends at once"
    )


def is_second(number: int, seconds: float) -> bool:
    """Return whether a signal that came some seconds after a request is another one; SIGXCPU comes every second."""
    return seconds > SAME_REQUEST_SECONDS and number != signal.SIGXCPU


class StopRequest:
    """Whether a signal asked this training to end, known to every worker of it.

    Args:
        waits_for_save: whether a first signal waits for a checkpoint, because the training saves some. Otherwise
            nobody needs to poll: the run ends at once.

    Attributes:
        number: the signal that asked; 0 for none.
    """

    def __init__(self, waits_for_save: bool = False) -> None:
        self.number, self.waits_for_save = 0, waits_for_save
        self._lifelines: list[int] = []

    def is_set(self) -> bool:
        """Return whether the training was asked to end; poll it after every step."""
        return self.number != 0

    def set(self, number: int) -> None:
        """Ask this process and all workers that it has started to end; may be called in a signal handler.

        Args:
            number: the signal that asked for it.
        """
        self.number = number
        for lifeline in self._lifelines:
            with suppress(OSError):  # the worker has ended
                os.write(lifeline, bytes([number]))

    def add_worker(self, lifeline: int) -> None:
        """Pass this request on to a worker: at once if it is set by now, since the worker may have been started before.

        Args:
            lifeline: file descriptor of a pipe to the worker.
        """
        self._lifelines.append(lifeline)
        if self.number:
            self.set(self.number)

    def forget_workers(self) -> None:
        """Pass nothing on any more: the workers have ended, or this is one of them."""
        self._lifelines.clear()


class LauncherSignals:
    """Signals of the process that starts a training's workers: a first one may be a request, a second one is the end.

    Args:
        stop: the request that the workers poll.
        grace: seconds from a request to the end.
        say: called with a sentence about a request.
    """

    def __init__(self, stop: StopRequest, grace: float, say: Callable[[str], None]) -> None:
        self._stop, self._grace, self._say, self._process = stop, grace, say, os.getpid()
        self._requested_at: float | None = None
        self._alarm_before: Any = None  # handler of SIGALRM before the request

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager: handle the signals in this process; does nothing outside of its main thread.

        Raises:
            Stopped: in the midst of whatever the process does, when a signal ends the run.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (*list_heeded(), *((signal.SIGINT,) if self._stop.waits_for_save else ()))
        old_handlers = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            # A second signal may come while the first is received, before the time for it has begun.
            if self._alarm_before is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, self._alarm_before)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked from the launcher: the signal is this process's alone, and its end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        received_at = time.monotonic()
        if not self._stop.waits_for_save:
            raise Stopped(number)
        if self._requested_at is None:
            self._requested_at = received_at
            self._stop.set(number)
            self._start_grace()
            self._say(describe_request(number, self._grace))
        elif number == signal.SIGINT or is_second(number, received_at - self._requested_at):
            raise Stopped(number)

    def _start_grace(self) -> None:
        # A timer of the system: in a signal handler no thread may be started, and forked processes do not inherit it.
        self._alarm_before = signal.signal(signal.SIGALRM, self._end_grace)
        signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-6))

    def _end_grace(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            raise Stopped(self._stop.number, f"no checkpoint was complete within {self._grace:g} s (--grace)")


def handle_in_worker(stop: StopRequest, launcher: int) -> None:
    """Set the stop signals of a worker that another process started, whatever handlers it inherited.

    Where checkpoints are saved, a worker that gets one (a batch system signals every process of a job) passes it on to
    its launcher, and lives on until that has decided. Otherwise the signal ends it.

    Args:
        stop: the request that the job's processes follow.
        launcher: process id of the process that started this one.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            os.kill(launcher, number)

    for number in list_heeded():
        signal.signal(number, pass_on if stop.waits_for_save else signal.SIG_DFL)
    os.register_at_fork(after_in_child=restore_signals)


def restore_signals() -> None:
    """Have the stop signals end this process again: called in processes that a worker forks, such as a loader's.

    But for a terminal's end, which all processes are told of: the worker needs what it has started, to save.
    """
    signal.set_wakeup_fd(-1)
    for number in list_heeded():
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
