"""Started worker: a process that a team of this host has started, from its own view: ties, function, report, end.

what arrives on its lifeline    what it does
the number of a signal          sets its stop request: the training is asked to end
the end of the pipe             kills itself: its parent has died, and nobody waits for it any more
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from polylane.output import guard_streams, put_work_first
from polylane.runtime.plain_data.serialization import encode
from polylane.runtime.workers.close_at_exit import end_at_once
from polylane.runtime.workers.failure import Failure
from polylane.runtime.workers.file_store import FileStore, MeetingPlace
from polylane.runtime.workers.forked_child import end_forked_children
from polylane.runtime.workers.launch_environment import hide_ranks
from polylane.runtime.workers.parent_tie import tie_to_parent
from polylane.runtime.workers.stop_request import StopRequest
from polylane.runtime.workers.worker_pipe import FAILURE, MESSAGE, RESULT, write_report
from polylane.runtime.workers.world import TIMEOUT, World, is_ordered


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


@dataclass
class StartedWorker:
    """One worker: what its parent gives to its process, which inherits it or gets it pickled.

    Attributes:
        rank: rank of this worker, from 0.
        workers: number of workers of the job.
        place: rendezvous of the job, with its secret.
        threads: number of intra-op threads of this worker.
        reports: write end of this worker's pipe to the parent.
        lifeline: read end of a pipe from the parent, which closes however the parent ends.
        stop: the request that all processes of the job follow.
        parent: process id of the process that starts the worker.
        inherited_descriptors: file descriptors that only the parent should have open; None for a new process.
    """

    rank: int
    workers: int
    place: MeetingPlace
    threads: int
    reports: Connection
    lifeline: Connection
    stop: StopRequest
    parent: int
    inherited_descriptors: list[int] | None

    def run_process(self, worker: Callable[[WorkerContext], object]) -> None:
        """Run the process: tie it to its parent, set its environment, run the worker's function."""
        if self.inherited_descriptors is None:
            guard_streams()
            put_work_first(speaks=self.rank == 0)
        else:
            # What the parent made stays: looking at it for garbage would copy its pages into this process.
            gc.freeze()
            # With a lifeline's write end open here, no worker would notice that the parent has died.
            for descriptor in self.inherited_descriptors:
                os.close(descriptor)
        self.stop.forget_workers()
        tie_to_parent(self.parent, self.stop)
        threading.Thread(target=self._follow_parent, name="polylane-lifeline", daemon=True).start()
        hide_ranks()
        torch.set_num_threads(self.threads)
        if self._run(worker) is not None:
            if is_ordered():
                end_at_once()
            sys.exit(1)

    def _follow_parent(self) -> None:
        """Set the stop request when the parent says so; kill this process when the parent has died."""
        while arrived := os.read(self.lifeline.fileno(), 1):
            self.stop.set(arrived[0])
        os.kill(os.getpid(), signal.SIGKILL)  # for systems without the death signal of Linux

    def _run(self, worker: Callable[[WorkerContext], object]) -> Failure | None:
        """Join the world, run a worker's function, report its result or failure, and leave; return the failure."""
        sending = threading.Lock()  # a report is several writes, and several threads of the function may send messages

        def send(kind: bytes, content: bytes | memoryview) -> None:
            with sending:
                write_report(self.reports, kind, content)

        try:
            store = FileStore(self.place, self.rank, self.workers, TIMEOUT)
            world = World.of_started_worker(store, self.rank, self.workers, self.stop)
            with end_forked_children():
                value = worker(WorkerContext(world, send))
            content = io.BytesIO()
            torch.save(value, content)
        except BaseException as error:  # SystemExit and KeyboardInterrupt included
            failure = Failure.of_exception(self.rank, error, skip_frames=1)
            send(FAILURE, pickle.dumps(failure))
            return failure
        send(RESULT, content.getbuffer())
        world.leave()
        return None
