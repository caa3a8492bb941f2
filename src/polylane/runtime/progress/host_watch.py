"""Host watch: a process that watches the workers of one host, where torchrun started these.

The first worker of a host forks it before it has threads or connections, and tells it over a pipe where the pages are:

    worker 0 of the host        fork ──▶ watch        waits at the pipe
    all workers                 make pages, all-gather (host, rank, process, descriptors)
    worker 0 of the host        cards ─▶ watch        opens /proc/PID/fd/N, looks
    worker 0 of the host        end ───▶ watch        exits; also where the pipe closes, since the worker died

A worker that hangs is killed, whereupon torchrun ends the others, and starts all again if it was told to.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from polylane.diagnosis.report import HangReport
from polylane.errors import WorkerHung
from polylane.runtime.progress.page import ProgressMemory, ProgressWriter
from polylane.runtime.progress.processes import read_state
from polylane.runtime.progress.watch import LOOK_SECONDS, HangWatch, OnHang

if TYPE_CHECKING:  # the watch of a script starts anew, without torch
    from polylane.runtime.workers.world import World

Keep = Callable[[HangReport], None]


@dataclass
class HostWatch:
    """A worker's end of the watch over its host.

    Attributes:
        pipe: write end of the pipe to the watching process; None on other workers than the first of the host.
        memories: what this worker has made for its own page.
    """

    pipe: int | None = None
    memories: list[ProgressMemory] = field(default_factory=list)

    @classmethod
    def start(cls, local_rank: int, on_hang: OnHang, hang_after: float | None, keep: Keep) -> HostWatch:
        """Start the watching process, on the first worker of a host; called before this process has threads.

        Args:
            local_rank: rank of this worker among those of its host, from 0.
            on_hang: what to do once a worker hangs, see :class:`.watch.HangWatch`.
            hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.
            keep: called in the watching process with every report, to keep it.
        """
        if local_rank != 0 or not os.path.isdir("/proc/self/fd"):
            return cls()
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            try:
                watch_host(reader, on_hang, hang_after, keep)
            finally:
                os._exit(0)
        os.close(reader)
        return cls(writer)

    def attach(self, world: World, raises_hangs: bool = False) -> World:
        """Return the world in which this worker writes where it is; a collective of all workers.

        Args:
            world: this worker among all workers.
            raises_hangs: see :class:`.page.ProgressWriter`.
        """
        if not os.path.isdir("/proc/self/fd"):
            return world
        memory = ProgressMemory.allocate()
        self.memories.append(memory)
        progress = ProgressWriter(memory, world.rank, raises_hangs=raises_hangs)
        host = socket.gethostname()
        cards = world.all_gather_object([host, world.rank, os.getpid(), memory.file, memory.stacks])
        self._tell([card[1:] for card in cards if card[0] == host])
        return replace(world, progress=progress)

    def end(self) -> None:
        """Tell the watching process that this worker has ended well."""
        self._tell([])
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def _tell(self, cards: list[list[int]]) -> None:
        if self.pipe is not None:
            with suppress(BrokenPipeError):
                os.write(self.pipe, json.dumps(cards).encode() + b"\n")


def watch_host(reader: int, on_hang: OnHang, hang_after: float | None, keep: Keep) -> None:
    """Watch the workers of this host, in a process of its own, until they have ended or one hangs.

    Args:
        reader: read end of the pipe from the first worker of the host.
        on_hang, hang_after, keep: the same arguments as of :meth:`HostWatch.start`.
    """
    # torchrun ends the session of a worker by these: the watch must see how that goes on.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        cards: list[list[int]] = json.loads(pipe.readline() or "[]")
        if not cards:
            return
        memories = {rank: ProgressMemory.of_process(pid, file, stacks) for rank, pid, file, stacks in cards}
        pids = {rank: pid for rank, pid, *_ in cards}
        watch = HangWatch(memories, on_hang, hang_after, keep)
        while not select.select([pipe], [], [], LOOK_SECONDS)[0]:
            gone = [rank for rank, pid in pids.items() if read_state(pid) in ("", "Z", "X")]
            if gone:
                if len(gone) < len(pids):
                    sentence = f"rank {gone[0]} (process {pids[gone[0]]}) has ended before the others"
                    keep(watch.report_failure(gone[0], sentence))
                return
            try:
                watch.look()
            except WorkerHung as error:
                print(f"polylane: {error}", file=sys.stderr, flush=True)
                for rank in error.ranks:
                    with suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGKILL)
                return
