"""Team: workers that a process of this host starts, which report over pipes, and end with it.

    start method    for                    a worker is                     starts in
    fork            the CPU                a copy of this process          well under half a second
    spawn           accelerators           a new process, which imports    seconds

To be forked, this process must not have initialised CUDA (checked), nor have run a tensor operation with more than one
thread. Once its OpenMP pool has started, children hang as soon as they use more than one thread themselves (measured).
So call :func:`.threads.limit_to_one_thread` before the first operation. If it still has more than one thread, each
worker gets one, which is safe. Threads of the parent do not exist in its children, but the locks that they held stay
locked there: start a live progress bar after the fork, at the first message.

    a worker ends by                the parent sees                     Failure
    returning                       RESULT                              -
    raising                         FAILURE, then its exit              the worker's own report
    a signal, os._exit              its exit without RESULT, FAILURE    Failure.of_exit
    losing a peer                   FAILURE with ``is_echo``            raised only if no cause follows in time
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from polylane.errors import PolylaneError
from polylane.output import say_at_once
from polylane.runtime.workers.failure import Failure, find_root_cause
from polylane.runtime.workers.file_store import MeetingPlace
from polylane.runtime.workers.out_of_memory import count_system_kills
from polylane.runtime.workers.parent_tie import INTERRUPTS
from polylane.runtime.workers.started_worker import StartedWorker, WorkerContext
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.threads import threads_per_worker
from polylane.runtime.workers.worker_pipe import Listener, WorkerPipe
from polylane.runtime.workers.world import accelerator_type

T = TypeVar("T")
Watch = Callable[[], None]
StartMethod = Literal["fork", "spawn"]
PROCESSES: dict[StartMethod, type[ForkProcess] | type[SpawnProcess]] = {"fork": ForkProcess, "spawn": SpawnProcess}

ECHO_GRACE_SECONDS = 0.8  # wait after an echo ("peer lost") for the report of the failure that caused it
# Wait for workers to exit by themselves after their results have arrived; a new process takes its interpreter apart.
EXIT_SECONDS: dict[StartMethod, float] = {"fork": 5.0, "spawn": 60.0}
TERM_SECONDS = 2.0  # wait between SIGTERM and SIGKILL
KILL_SECONDS = 2.0  # wait after SIGKILL, which the system does not carry out while it holds a process itself
POLL_SECONDS = 0.2  # interval of checks for workers that died without closing their pipe
REAP_SECONDS = 0.001  # interval of checks for the exit code of a worker that has closed its pipe
# Of a function with its arguments, for a new process: a pipe holds 64 KiB, and what prepares the process comes first.
MOST_SENT_BYTES = 48 << 10
PIPE_BYTES = 1 << 20  # capacity of a report pipe, so that workers seldom wait for a busy parent


def start_workers(
    worker: Callable[[WorkerContext], T],
    workers: int,
    on_message: Listener | None = None,
    stop: StopRequest | None = None,
    watch: Watch = lambda: None,
    *,
    start_method: StartMethod,
) -> list[T]:
    """Run ``worker(context)`` in ``workers`` processes of this host; return their results by rank.

    No worker has RANK or WORLD_SIZE in its environment: code of the user's in it cannot tell it from the only process.
    The workers meet without any port of this host (:mod:`.file_store`); a process group, which listens on ports, is
    made when it is needed. Ctrl-C is handled by this process alone: it ends the workers, then raises KeyboardInterrupt.

    Args:
        worker: function to run; for new processes it must be picklable, so defined at the top of a module. Its result
            must be as well, whose tensors arrive on the CPU.
        workers: number of processes, at least 1.
        on_message: called in this thread with (rank, content) for each ``context.send_message(content)``.
        stop: the request that the workers poll as ``context.world.stop``; None: one that nobody sets.
        watch: called several times a second; what it raises ends the workers, and is raised here.
        start_method: how the processes begin. A forked worker has the states of this process's random generators.

    Raises:
        PolylaneError: this process cannot be forked; or the function cannot be pickled, or is too large for a new
            process; or a worker raised one, which is raised again here.
        WorkerFailed: a worker raised another exception, or was killed. All others have ended by then, too.
    """
    if workers < 1:
        raise PolylaneError(f"at least one worker is needed, not {workers}")
    if start_method == "fork":
        _refuse_unsafe_fork()
    else:
        _refuse_large(worker)
    team: _WorkerTeam[T] = _WorkerTeam(stop or StopRequest(), start_method)
    try:
        team.start_all(worker, workers)
        results = team.collect_results(on_message, watch)
        team.wait_exited(EXIT_SECONDS[start_method])
        return results
    finally:
        team.end_all()


def fork_workers(
    worker: Callable[[WorkerContext], T],
    workers: int,
    on_message: Listener | None = None,
    stop: StopRequest | None = None,
    watch: Watch = lambda: None,
) -> list[T]:
    """Run ``worker(context)`` in forked processes: :func:`start_workers` by "fork", with its arguments and errors."""
    return start_workers(worker, workers, on_message, stop, watch, start_method="fork")


def choose_start_method() -> StartMethod:
    """Return how workers of this host must begin: CUDA cannot be used in a process forked from one that has used it.

    Calling this may initialize the accelerator's driver.
    """
    return "fork" if accelerator_type() is None else "spawn"


def _refuse_unsafe_fork() -> None:
    if dist.is_initialized():
        raise PolylaneError(
            "workers cannot be forked: this process is itself a worker of an initialized process group; start the "
            "workers before init_process_group"
        )
    if torch.cuda.is_initialized():
        raise PolylaneError(
            "workers cannot be forked: this process has already started CUDA, which a forked child cannot use; "
            "set CUDA_VISIBLE_DEVICES= to compute on the CPU, or start the workers with torchrun"
        )


@dataclass
class _TeamMember(WorkerPipe[T]):
    """One worker, from the view of the parent.

    Attributes:
        lifeline: write end of a pipe that only this process holds, so it closes however this process ends.
        process: the process that runs the worker's function.
    """

    lifeline: Connection = field(kw_only=True)
    process: ForkProcess | SpawnProcess = field(kw_only=True)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; its exit code is not known where another waiter has reaped it.

        That is the system itself where SIGCHLD is ignored, or a handler of the recipe's that waits for any child.
        """
        if self.process.exitcode is not None:
            return True
        try:
            os.kill(self.process.pid or 0, 0)
        except ProcessLookupError:
            return True
        return False

    def close(self) -> None:
        """Close the pipe, and forget the process: also one that is still there, which nobody waits for any more."""
        self.reports.close()
        self.lifeline.close()
        if self.process.exitcode is not None:
            self.process.close()
        else:  # or multiprocessing would join it at exit
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]


class _WorkerTeam(Generic[T]):
    """All workers of one call, from their start to reaping.

    Args:
        stop: the request that the workers follow.
        start_method: how their processes begin.
    """

    def __init__(self, stop: StopRequest, start_method: StartMethod) -> None:
        self.members: list[_TeamMember[T]] = []
        self.stop = stop
        self.start_method = start_method
        self.place = MeetingPlace.in_memory()
        self._kills_before, self._ignored_exits = count_system_kills(), False

    def start_all(self, worker: Callable[[WorkerContext], T], workers: int) -> None:
        """Start all workers."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # Ignored, as a shell or the recipe left it, no exit is seen; it is ignored again when all have ended.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._ignored_exits = True
        if self.start_method == "spawn":
            resource_tracker.ensure_running()  # its start lets interrupts through again
        # A worker must be in the list of members before an interrupt can end these.
        with _hold_interrupts():
            threads = threads_per_worker(workers)
            for rank in range(workers):
                self._start(worker, rank, workers, threads)

    def _start(self, worker: Callable[[WorkerContext], T], rank: int, workers: int, threads: int) -> None:
        reports_read, reports_write = multiprocessing.Pipe(duplex=False)
        lifeline_read, lifeline_write = multiprocessing.Pipe(duplex=False)
        _enlarge_pipe(reports_write)
        parent_ends = [reports_read, lifeline_write]
        parent_ends += [pipe for member in self.members for pipe in (member.reports, member.lifeline)]
        to_close = [pipe.fileno() for pipe in parent_ends] if self.start_method == "fork" else None
        started = StartedWorker(
            rank, workers, self.place, threads, reports_write, lifeline_read, self.stop, os.getpid(), to_close
        )
        process = PROCESSES[self.start_method](
            target=started.run_process, args=(worker,), name=f"polylane-worker-{rank}"
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            for pipe in (reports_read, lifeline_write):
                pipe.close()
            raise PolylaneError(
                f"{worker!r} cannot be sent to new processes: define it at the top of a module, not inside a function "
                f"({error})"
            ) from None
        finally:
            reports_write.close()
            lifeline_read.close()
        self.members.append(_TeamMember(rank, reports_read, lifeline=lifeline_write, process=process))
        self.stop.add_worker(lifeline_write.fileno())

    def collect_results(self, on_message: Listener | None, watch: Watch) -> list[T]:
        """Read reports until every result has arrived; raise the root cause of the first failure."""
        give_up: float | None = None
        while waiting := [member for member in self.members if not member.has_ended]:
            self._read_reports(waiting, on_message)
            watch()
            failures = [member.failure for member in self.members if member.failure is not None]
            cause = find_root_cause(failures)
            if cause is None:
                continue
            # An echo is not raised at once: the worker that caused it may not have reported yet.
            give_up = give_up or time.monotonic() + ECHO_GRACE_SECONDS
            if not cause.is_echo or time.monotonic() > give_up:
                raise cause.to_exception()
        cause = find_root_cause(member.failure for member in self.members if member.failure is not None)
        if cause is not None:
            raise cause.to_exception()
        return [member.result[0] for member in self.members]

    def _read_reports(self, waiting: list[_TeamMember[T]], on_message: Listener | None) -> None:
        """Read reports that have arrived, and detect dead workers, whose pipes may still hold a report."""
        sources: list[Any] = [member.process.sentinel for member in waiting]
        sources += [member.reports for member in waiting if not member.reports.closed]
        ready = connection.wait(sources, POLL_SECONDS)
        for member in waiting:
            # Its end before the pipe: what a dead worker sent is complete, so after draining it nothing follows.
            is_gone = member.is_gone
            if member.reports in ready:
                member.read_reports(on_message)
            while is_gone and not member.has_ended and not member.reports.closed and member.reports.poll():
                member.read_reports(on_message)
            if is_gone and not member.has_ended:
                member.failure = Failure.of_exit(member.rank, member.process.exitcode, self._kills_before)

    def wait_exited(self, seconds: float) -> bool:
        """Wait for workers to exit by themselves; return whether all did in time."""
        deadline = time.monotonic() + seconds
        while alive := [m.process.sentinel for m in self.members if not m.is_gone]:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                return False
            if connection.wait(alive, min(seconds_left, POLL_SECONDS)):
                time.sleep(REAP_SECONDS)
        return True

    def end_all(self) -> None:
        """Terminate and reap every worker, and close all pipes and files; give up on one that SIGKILL does not end."""
        with _hold_interrupts():
            for member in self.members:
                # A worker that saves checkpoints takes SIGTERM for a request to save, see handle_in_worker.
                end = member.process.kill if self.stop.waits_for_save else member.process.terminate
                end()
            if not self.wait_exited(TERM_SECONDS):
                for member in self.members:
                    member.process.kill()
                if not self.wait_exited(KILL_SECONDS):
                    self._name_left_behind()
            self.stop.forget_workers()
            for member in self.members:
                member.close()
            self.place.remove_files()
            if self._ignored_exits and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _name_left_behind(self) -> None:
        for member in self.members:
            if not member.is_gone:
                say_at_once(
                    f"worker {member.rank} (process {member.process.pid}) does not end after SIGKILL: the system "
                    "holds it (a frozen cgroup, or a disk that does not answer); it ends when it is released"
                )


def _refuse_large(worker: Callable[..., Any]) -> None:
    """Refuse a function that a new process would not get at once: this one would wait for it, deaf to signals.

    Raises:
        PolylaneError: its pickle is larger than what a pipe holds.
    """
    with suppress(pickle.PicklingError, AttributeError, TypeError):  # which the start itself reports
        size = len(ForkingPickler.dumps(worker))
        if size > MOST_SENT_BYTES:
            raise PolylaneError(
                f"a function of {size:,} bytes with its arguments cannot be sent to new processes, whose limit is "
                f"{MOST_SENT_BYTES:,}: have it load what is large"
            )


def _enlarge_pipe(pipe: Connection) -> None:
    """Enlarge the buffer of a pipe, if the system supports it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # the system limits the total by user
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Context manager: block Ctrl-C and the stop signals, which are delivered at the end."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
