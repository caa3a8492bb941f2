"""Workers started by torchrun's elastic agent: for GPUs, which forked processes cannot use if their parent did."""

from __future__ import annotations

import math
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from polylane.errors import PolylaneError
from polylane.graph.quiet_tracing import loggers_silenced
from polylane.output import guard_streams, put_work_first
from polylane.runtime.workers.failure import Failure, find_root_cause
from polylane.runtime.workers.file_store import MeetingPlace
from polylane.runtime.workers.fork import (
    ECHO_GRACE_SECONDS,
    Watch,
    WorkerContext,
    run_worker,
    threads_per_worker,
)
from polylane.runtime.workers.out_of_memory import count_system_kills
from polylane.runtime.workers.parent_tie import tie_to_parent
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.worker_pipe import Listener, WorkerPipe
from polylane.runtime.workers.world import hide_ranks

T = TypeVar("T")

SHUTDOWN_SECONDS = 2  # between SIGTERM and SIGKILL, for workers that the agent ends
STOP_FILE = "stop"  # of the stop request, in the folder of the rendezvous
LEFT_SECONDS = 2 * ECHO_GRACE_SECONDS  # for the others to report a lost peer, before they are ended
NOTICE_SECONDS = 0.4  # in which the agent, which looks ten times a second, has seen an exit code other than 0
INTRODUCTION_SECONDS = 10.0  # timeout of the secret and rank that a worker sends after connecting


def spawn_workers(
    worker: Callable[[WorkerContext], T],
    workers: int,
    on_message: Listener | None = None,
    stop: StopRequest | None = None,
    watch: Watch = lambda: None,
) -> list[T]:
    """Run ``worker(context)`` in new processes of this host under torchrun's agent; return their results by rank.

    Like :func:`polylane.runtime.workers.fork.fork_workers`, but starting takes seconds.

    Args:
        worker: picklable function to run, so defined at the top of a module.
        workers: number of processes, at least 1.
        on_message: called in its own thread with (rank, content) of each message; what it raises is raised at the end.
        stop: the request that the workers poll as ``context.world.stop``; None: one that nobody sets.
        watch: called before the workers start, and once one has failed; what it raises is raised here.

    Raises:
        PolylaneError: the function cannot be pickled; or a worker raised one, which is raised again here.
        WorkerFailed: a worker raised another exception, or was killed; all others have ended by then.
    """
    try:
        pickle.dumps(worker)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PolylaneError(f"{worker!r} cannot be sent to new processes: define it in a module ({error})") from None
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=secrets.token_hex(8),
        rdzv_backend=_SingleAgentRendezvous.name,
        local_addr="localhost",
        max_restarts=0,
        # Others are this process's own: what the agent does with a signal leaves no time to save anything.
        signals_to_handle="SIGQUIT",
        shutdown_timeout=SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    meeting_place = MeetingPlace.in_folder()
    server: _ReportServer[T] = _ReportServer(meeting_place, on_message)
    stop = stop or StopRequest()
    stop.move_to_file(meeting_place.folder / STOP_FILE)
    arguments = (worker, server.address, meeting_place, os.getpid(), threads_per_worker(workers), stop.waits_for_save)
    try:
        watch()
        with _restoring_handlers():
            elastic_launch(config, _run_process)(*arguments)
    except (ChildFailedError, SignalException) as error:
        if isinstance(error, SignalException) and not server.have_all_left:
            raise
        watch()
        deaths = {rank: failure.exitcode for rank, failure in getattr(error, "failures", {}).items()}
        raise server.find_cause(deaths).to_exception() from None
    finally:
        try:
            server.close()
        finally:
            meeting_place.remove_files()
    return [server.lines[rank].result[0] for rank in range(workers)]


class _SingleAgentRendezvous(RendezvousHandler):
    """Rendezvous of one agent with itself; torch's own one listens on a port, and unpickles what it receives."""

    name = "polylane"

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run, self._store = parameters.run_id, dist.HashStore()  # type: ignore[attr-defined]

    def get_backend(self) -> str:
        return self.name

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # The address is not used: workers meet over a file (MeetingPlace).
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_SingleAgentRendezvous.name, _SingleAgentRendezvous)


class _ReportServer(Generic[T]):
    """Server that receives the workers' reports over a Unix socket, in a thread of its own until it is closed.

    Reports are pickles. So the socket is in a folder that only this user may enter, and a client must send the secret
    of the job before anything else is read.

    Args:
        meeting_place: rendezvous of the job, in a folder, with its secret.
        on_message: called in the server's thread with (rank, content) of a message; or None.

    Attributes:
        lines: pipe of each worker that has connected, by rank.
        address: path of the server's socket.
    """

    def __init__(self, meeting_place: MeetingPlace, on_message: Listener | None) -> None:
        self._key = meeting_place.secret
        self.lines: dict[int, WorkerPipe[T]] = {}
        self._processes: dict[int, int] = {}  # by rank, the number of a worker's process
        self._kills_before = count_system_kills()
        self._failures: list[Failure] = []  # in the order of arrival
        # By rank, when a worker has ended without a report, and before the agent could have ended it.
        self._silent_ranks: dict[int, float] = {}
        self._first_failure = math.inf  # when the first failure was reported
        self._ends_others = False  # whether those that have not left were ended here
        self._on_message = on_message
        self.address = str(meeting_place.folder / "office")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        self._closing, self._close = os.pipe()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="polylane-office", daemon=True)
        self._thread.start()

    def find_cause(self, deaths: dict[int, int]) -> Failure:
        """Return the root cause of a failed job, from reports and from how workers without a report have ended.

        Args:
            deaths: by rank, exit codes other than 0 of workers that the agent saw end.
        """
        self.close()
        reported = {failure.rank for failure in self._failures}
        late = time.monotonic() - NOTICE_SECONDS
        silent_codes = {rank: 0 if self._ends_others or at < late else None for rank, at in self._silent_ranks.items()}
        # Where the agent saw a death by itself that comes first: with it, it has ended all others.
        codes = {**({} if self._ends_others else deaths), **silent_codes, **deaths}
        silent = [
            Failure.of_exit(rank, code, self._kills_before) for rank, code in codes.items() if rank not in reported
        ]
        cause = find_root_cause([*self._failures, *silent])
        assert cause is not None  # the agent saw a failure, so there is at least one
        return cause

    def close(self) -> None:
        """Read the remaining reports, then stop; raise an exception of ``on_message``, if there was any."""
        if self._thread.is_alive():
            os.close(self._close)
            self._thread.join()
            os.close(self._closing)
            self._server.close()
            if self._error is not None:
                raise self._error

    def _serve(self) -> None:
        ends_at: float | None = None  # when the others are ended, since one has left
        while True:
            # Closing the write end of a pipe makes _closing readable: that wakes this thread up to end.
            open_lines = {line.reports: line for line in self.lines.values() if not line.reports.closed}
            seconds = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            ready = connection.wait([self._server, self._closing, *open_lines], seconds)
            if not ready:  # they may wait for that one in a place where nothing tells them
                self._end_workers()
                ends_at = None
            for source in ready:
                if source is self._server:
                    self._accept_worker()
                elif isinstance(source, connection.Connection):
                    self._read_reports(open_lines[source])
                    if self._silent_ranks and ends_at is None:
                        ends_at = time.monotonic() + LEFT_SECONDS
            if ready == [self._closing]:  # and no report is left to read
                for line in open_lines.values():
                    line.reports.close()
                return

    def _accept_worker(self) -> None:
        connected = self._server.accept()[0]
        _set_read_timeout(connected, INTRODUCTION_SECONDS)
        reports = connection.Connection(os.dup(connected.fileno()))
        # Any malformed introduction drops the connection: it is not a worker's, and must not stop the server.
        with suppress(EOFError, OSError, ValueError), connected:
            if secrets.compare_digest(reports.recv_bytes(len(self._key)), self._key):
                rank = int(reports.recv_bytes(20))
                _set_read_timeout(connected, 0)
                self._processes[rank] = _find_peer(connected)
                self.lines[rank] = WorkerPipe(rank, reports)
                return
        reports.close()

    def _end_workers(self) -> None:
        """Kill the workers that have not left, which the agent takes for a failure: it waits for those that have."""
        self._ends_others = True
        # Its handler raises SignalException; where it has ended, or has none, the signal would end this process.
        if self.have_all_left and callable(signal.getsignal(signal.SIGQUIT)):
            os.kill(os.getpid(), signal.SIGQUIT)
        for rank, process in self._processes.items():
            if rank not in self._silent_ranks:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    @property
    def have_all_left(self) -> bool:
        """Whether every worker has ended without a report."""
        return bool(self._processes) and self._processes.keys() <= self._silent_ranks.keys()

    def _read_reports(self, line: WorkerPipe[T]) -> None:
        try:
            line.read_reports(self._on_message)
        except Exception as error:  # raised by on_message: it must not stop the server
            self._error = self._error or error
        if line.failure is not None and line.failure not in self._failures:
            self._failures.append(line.failure)
            self._first_failure = min(self._first_failure, time.monotonic())
        # Those that end after a failure are ended by the agent; an echo may be here before what it is the echo of.
        is_caused = any(not failure.is_echo for failure in self._failures)
        seconds = time.monotonic()
        if (
            line.reports.closed
            and not line.has_ended
            and not is_caused
            and seconds < self._first_failure + NOTICE_SECONDS
        ):
            self._silent_ranks[line.rank] = seconds


def _set_read_timeout(connected: socket.socket, seconds: float) -> None:
    """Set the timeout of reads of a connection in seconds; 0: none."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), 0))


def _find_peer(connected: socket.socket) -> int:
    """Return the number of the process at the other end of a Unix socket."""
    process, _, _ = struct.unpack("@iII", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def _run_process(
    worker: Callable[[WorkerContext], object],
    address: str,
    meeting_place: MeetingPlace,
    parent: int,
    threads: int,
    waits_for_save: bool,
) -> None:
    """Run a new process: connect to the report server, introduce itself, run the worker's function."""
    guard_streams()
    put_work_first()
    stop = StopRequest.in_file(meeting_place.folder / STOP_FILE, waits_for_save)
    tie_to_parent(parent, stop, under_agent=True)
    torch.set_num_threads(threads)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hide_ranks()
    report_server = socket.socket(socket.AF_UNIX)
    report_server.connect(address)
    reports = connection.Connection(report_server.detach())
    reports.send_bytes(meeting_place.secret)
    reports.send_bytes(str(rank).encode())
    failure = run_worker(worker, rank, workers, meeting_place, reports, stop)
    if failure is not None:
        if failure.is_echo:
            # The agent ends all workers as soon as one exits: the one that caused the echo must report first.
            time.sleep(ECHO_GRACE_SECONDS)
        sys.exit(1)


@contextmanager
def _restoring_handlers() -> Iterator[None]:
    """Context manager: silence the agent's loggers, and restore them and the signal handlers that it installs."""
    handler = signal.getsignal(signal.SIGQUIT)
    try:
        with loggers_silenced("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, handler)
