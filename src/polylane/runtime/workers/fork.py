"""Forked workers on this host: they start in well under half a second, report over pipes, and end with their parent.

The parent must be safe to fork: it has not initialised CUDA (checked), and has run no tensor operation with more than
one thread. Once its OpenMP pool has started, children hang as soon as they use more than one thread themselves
(measured). So call :func:`limit_to_one_thread` before the first operation. If the parent still has more than one
thread, each worker gets one, which is safe. Threads of the parent do not exist in its children, but the locks that they
held stay locked there: start a live progress bar after the fork, at the first message.

    a worker ends by                the parent sees                     Failure
    returning                       RESULT                              -
    raising                         FAILURE, then its exit              the worker's own report
    a signal, os._exit              its exit without RESULT, FAILURE    Failure.of_exit
    losing a peer                   FAILURE with ``is_echo``            raised only if no cause follows in time
"""

from __future__ import annotations

import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from polylane.errors import PolylaneError
from polylane.graph.python_state.autograd_engine import start_autograd_engine
from polylane.output import say_at_once
from polylane.runtime.plain_data.serialization import encode
from polylane.runtime.workers.failure import Failure, find_root_cause
from polylane.runtime.workers.file_store import FileStore, MeetingPlace
from polylane.runtime.workers.forked_child import end_forked_children
from polylane.runtime.workers.out_of_memory import count_system_kills
from polylane.runtime.workers.parent_tie import INTERRUPTS, tie_to_parent
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.worker_pipe import FAILURE, MESSAGE, RESULT, Listener, WorkerPipe
from polylane.runtime.workers.world import TIMEOUT, World, affine_cores, hide_ranks

T = TypeVar("T")
Watch = Callable[[], None]

ECHO_GRACE_SECONDS = 0.8  # wait after an echo ("peer lost") for the report of the failure that caused it
EXIT_SECONDS = 5.0  # wait for workers to exit by themselves after their results have arrived
TERM_SECONDS = 2.0  # wait between SIGTERM and SIGKILL
KILL_SECONDS = 2.0  # wait after SIGKILL, which the system does not carry out while it holds a process itself
POLL_SECONDS = 0.2  # interval of checks for workers that died without closing their pipe
REAP_SECONDS = 0.001  # interval of checks for the exit code of a worker that has closed its pipe
PIPE_BYTES = 1 << 20  # capacity of a report pipe, so that workers seldom wait for a busy parent


@dataclass(frozen=True)
class WorkerContext:
    """Context of a worker's function: its world, and messages to the parent.

    Attributes:
        world: this worker among all workers; without a process group until :meth:`World.connect`.
    """

    world: World
    _send_report: Callable[[bytes, bytes], None] = field(repr=False)

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """Device on which this worker computes."""
        return self.world.device

    def send_message(self, content: dict[str, Any]) -> None:
        """Send a small dict of plain values to the parent's ``on_message``; messages of one worker arrive in order."""
        self._send_report(MESSAGE, encode(content))


def limit_to_one_thread() -> None:
    """Make this process safe to fork; must be called before its first tensor operation."""
    torch.set_num_threads(1)
    start_autograd_engine()


def fork_workers(
    worker: Callable[[WorkerContext], T],
    workers: int,
    on_message: Listener | None = None,
    stop: StopRequest | None = None,
    watch: Watch = lambda: None,
) -> list[T]:
    """Run ``worker(context)`` in ``workers`` forked processes of this host; return their results by rank.

    Each worker has the states of this process's random number generators, and no RANK or WORLD_SIZE in its environment:
    code of the user's in it cannot tell it from the only process. The workers meet without any port of this host
    (:mod:`.file_store`); a process group, which listens on ports, is made when it is needed. Ctrl-C is handled by this
    process alone: it ends the workers, then raises KeyboardInterrupt.

    Args:
        worker: function to run; it need not be picklable, but its result must be, whose tensors arrive on the CPU.
        workers: number of processes, at least 1.
        on_message: called in this thread with (rank, content) for each ``context.send_message(content)``.
        stop: the request that the workers poll as ``context.world.stop``; None: one that nobody sets.
        watch: called several times a second; what it raises ends the workers, and is raised here.

    Raises:
        PolylaneError: this process cannot be forked; or a worker raised one, which is raised again here.
        WorkerFailed: a worker raised another exception, or was killed. All others have ended by then, too.
    """
    _refuse_unsafe_fork(workers)
    team: _WorkerTeam[T] = _WorkerTeam(stop or StopRequest())
    try:
        team.fork_all(worker, workers)
        results = team.collect_results(on_message, watch)
        team.wait_exited(EXIT_SECONDS)
        return results
    finally:
        team.end_all()


def _refuse_unsafe_fork(workers: int) -> None:
    if workers < 1:
        raise PolylaneError(f"at least one worker is needed, not {workers}")
    if dist.is_initialized():
        raise PolylaneError("workers cannot be forked: this process is itself a worker of an initialised process group")
    if torch.cuda.is_initialized():
        raise PolylaneError(
            "workers cannot be forked: this process has already started CUDA, which a forked child cannot use; "
            "set CUDA_VISIBLE_DEVICES= to compute on the CPU, or start the workers with torchrun"
        )


def threads_per_worker(workers: int) -> int:
    """Return the number of intra-op threads of each worker of this host: its share of the cores, at least one."""
    if torch.get_num_threads() > 1:  # an OpenMP pool may have started here; a single thread never uses it
        return 1
    return max(1, affine_cores() // workers)


# ---------------------------------------------------------------------------------------------------- the parent's side


@dataclass
class _ForkedWorker(WorkerPipe[T]):
    """One forked worker, from the view of the parent."""

    process: ForkProcess = field(kw_only=True)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; its exit code is not known where somebody else has asked the system for it.

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
        if self.process.exitcode is not None:
            self.process.close()
        else:  # else the interpreter's exit would wait for it
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]


class _WorkerTeam(Generic[T]):
    """All workers of one call, from fork to reaping."""

    def __init__(self, stop: StopRequest) -> None:
        self.members: list[_ForkedWorker[T]] = []
        self.stop = stop
        self.place = MeetingPlace.in_memory()
        self._kills_before, self._ignored_exits = count_system_kills(), False
        # The write end is only in this process, so it closes however this process ends; children wait at the read end.
        self.lifeline, self._lifeline_held = os.pipe()

    def fork_all(self, worker: Callable[[WorkerContext], T], workers: int) -> None:
        """Fork all workers."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # Ignored, as a shell or the recipe left it, no exit is seen; it is ignored again when all have ended.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._ignored_exits = True
        # A child must be in the list of members before an interrupt can end these.
        with _hold_interrupts():
            threads = threads_per_worker(workers)
            for rank in range(workers):
                reader, writer = multiprocessing.Pipe(duplex=False)
                _enlarge_pipe(writer)
                not_mine = [self._lifeline_held, reader.fileno()]
                not_mine += [member.reports.fileno() for member in self.members]
                child = _ChildProcess(rank, workers, self.place, threads, writer, self.lifeline, not_mine, self.stop)
                process = multiprocessing.get_context("fork").Process(
                    target=child.run_process, args=(worker, os.getpid()), name=f"polylane-worker-{rank}"
                )
                process.start()
                writer.close()
                self.members.append(_ForkedWorker(rank, reader, process=process))

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

    def _read_reports(self, waiting: list[_ForkedWorker[T]], on_message: Listener | None) -> None:
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
        """Terminate and reap every worker, and close all pipes and files; leave one behind that cannot be killed."""
        with _hold_interrupts():
            for member in self.members:
                # With checkpoints a worker takes SIGTERM for a request, see handle_in_worker.
                (member.process.kill if self.stop.waits_for_save else member.process.terminate)()
            if not self.wait_exited(TERM_SECONDS):
                for member in self.members:
                    member.process.kill()
                if not self.wait_exited(KILL_SECONDS):
                    self._name_left_behind()
            for member in self.members:
                member.close()
            os.close(self.lifeline)
            os.close(self._lifeline_held)
            self.place.remove_files()
            if self._ignored_exits and signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def _name_left_behind(self) -> None:
        for member in self.members:
            if not member.is_gone:
                say_at_once(
                    f"worker {member.rank} (process {member.process.pid}) was killed and does not end: the system "
                    "holds it, as a frozen cgroup or a disk that does not answer does; it is left behind, and ends "
                    "when the system lets go of it"
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


# ---------------------------------------------------------------------------------------------------- the worker's side


@dataclass
class _ChildProcess:
    """One forked worker, from its own view.

    Attributes:
        rank: rank of this worker, from 0.
        workers: number of workers of the job.
        place: rendezvous of the job, with its secret.
        threads: number of intra-op threads of this worker.
        reports: write end of this worker's pipe to the parent.
        lifeline: read end of a pipe whose write end closes when the parent ends.
        inherited_descriptors: file descriptors that only the parent should have open.
        stop: the request that all processes of the job share.
    """

    rank: int
    workers: int
    place: MeetingPlace
    threads: int
    reports: Connection
    lifeline: int
    inherited_descriptors: list[int]
    stop: StopRequest

    def run_process(self, worker: Callable[[WorkerContext], object], parent: int) -> None:
        """Run the forked process: tie it to its parent, set its environment, run the worker's function."""
        # What the parent made stays: looking at it for garbage would copy its pages into this process.
        gc.freeze()
        # With the lifeline's write end open here, no child would notice that the parent has died.
        for descriptor in self.inherited_descriptors:
            os.close(descriptor)
        tie_to_parent(parent, self.stop)
        threading.Thread(target=self._watch_parent, name="polylane-lifeline", daemon=True).start()
        hide_ranks()
        torch.set_num_threads(self.threads)
        if run_worker(worker, self.rank, self.workers, self.place, self.reports, self.stop) is not None:
            sys.exit(1)

    def _watch_parent(self) -> None:
        """Kill this process when its parent has died; for systems without the death signal of Linux."""
        os.read(self.lifeline, 1)  # nobody writes: it returns when the parent's end closes
        os.kill(os.getpid(), signal.SIGKILL)


def run_worker(
    worker: Callable[[WorkerContext], object],
    rank: int,
    workers: int,
    meeting_place: MeetingPlace,
    reports: Connection,
    stop: StopRequest,
) -> Failure | None:
    """Join the world, run a worker's function, report its result or failure, and leave; return the failure or None.

    Args:
        worker: the worker's function, called with its context.
        rank: rank of this worker, from 0.
        workers: number of workers of the job.
        meeting_place: rendezvous of the job, with its secret.
        reports: connection to the parent, for messages, result and failure.
        stop: the request that all processes of the job share.
    """
    sending = threading.Lock()  # a report is two writes, and the function may send messages from several threads

    def send(kind: bytes, content: bytes | memoryview) -> None:
        with sending:
            reports.send_bytes(kind)
            reports.send_bytes(content)

    try:
        world = World.of_started_worker(FileStore(meeting_place, rank, workers, TIMEOUT), rank, workers, stop)
        with end_forked_children():
            value = worker(WorkerContext(world, send))
        content = io.BytesIO()
        torch.save(value, content)
    except BaseException as error:  # SystemExit and KeyboardInterrupt included
        failure = Failure.of_exception(rank, error, skip_frames=1)
        send(FAILURE, pickle.dumps(failure))
        return failure
    send(RESULT, content.getbuffer())
    world.leave()
    return None
