"""Host watch: a process that watches the workers of one host, where torchrun started these.

The first worker of a host forks it before it has threads or connections, and tells it over a pipe where the pages are:

    worker 0 of the host        fork ──▶ watch        waits at the pipe
    all workers                 make pages, all-gather a card each: its host, process, descriptors
    worker 0 of the host        cards ─▶ watch        opens /proc/PID/fd/N, looks; of several hosts: joins their board
    worker 0 of the host        end ───▶ watch        exits; also where the pipe closes, since the worker died

A worker that hangs is killed, whereupon torchrun ends the others, and starts all again if restarts are left. A host is
what one agent of torchrun has started: two agents on one machine are two hosts, whatever the machine is called.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from polylane.diagnosis.report import ENDED_STATES, HangReport
from polylane.errors import CallsDiffer, WorkerHung
from polylane.output import open_output, put_work_first, say_at_once
from polylane.runtime.progress.host_board import Board, Host
from polylane.runtime.progress.joint_watch import JointWatch
from polylane.runtime.progress.processes import read_state
from polylane.runtime.progress.watch import LOOK_SECONDS, HangWatch, OnHang
from polylane.runtime.progress_page import ProgressMemory, ProgressWriter
from polylane.runtime.workers.stop_request import STOP_SIGNALS

if TYPE_CHECKING:  # the watch of a script starts anew, without torch
    from polylane.runtime.workers.world import World

REST_SECONDS = 0.05  # between two looks at the workers that end after the first one
END_SECONDS = 0.5  # wait for the store, before the watching process ends with the workers

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

    def attach(self, world: World, is_script: bool = False) -> World:
        """Return the world in which this worker writes where it is; a collective of all workers.

        Args:
            world: this worker among all workers.
            is_script: whether a script of the user's calls collective methods, and raises what the watch has found.
        """
        if not os.path.isdir("/proc/self/fd"):
            return world
        memory = ProgressMemory.allocate()
        self.memories.append(memory)
        progress = ProgressWriter(memory, world.rank, is_script=is_script)
        name = secrets.token_hex(16)  # that of rank 0 names this start of the training
        card = [*identify_host(), name, os.getpid(), memory.file, memory.stacks]
        self._tell(orders := make_orders(world.all_gather_object(card), world.rank))
        hosts = {rank: name for name, ranks in orders["hosts"] for rank in ranks} if len(orders["hosts"]) > 1 else {}
        return replace(world, progress=progress, host_names=tuple(hosts[rank] for rank in sorted(hosts)))

    def end(self) -> None:
        """Tell the watching process that this worker has ended well."""
        self._tell({})
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def _tell(self, orders: dict[str, Any]) -> None:
        if self.pipe is not None:
            with suppress(BrokenPipeError):
                os.write(self.pipe, json.dumps(orders).encode() + b"\n")


def identify_host() -> tuple[str, str, str]:
    """Return what tells this worker's host from others, its name, and its number; "" where nobody has given it one."""
    number = os.environ.get("GROUP_RANK", "")
    kernel = ["boot_id", "pid", "net"]  # two containers of one machine are two hosts
    with suppress(OSError):
        spaces = (os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net"))
        kernel = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces]
    return " ".join((number, socket.gethostname(), *kernel)), socket.gethostname(), number


def make_orders(cards: Sequence[Sequence[Any]], rank: int) -> dict[str, Any]:
    """Return the orders for the watching process of a host.

    Args:
        cards: by rank, identity, name and number of its host, a random name, its process and the descriptors there.
        rank: rank of a worker of that host.
    """
    members: dict[str, list[int]] = {}
    for worker, card in enumerate(cards):
        members.setdefault(card[0], []).append(worker)
    names = {identity: str(cards[ranks[0]][1]) for identity, ranks in members.items()}
    duplicates = {name for name in names.values() if list(names.values()).count(name) > 1}
    for index, (identity, ranks) in enumerate(members.items()):
        if names[identity] in duplicates:
            names[identity] += f" (node {cards[ranks[0]][2] or index})"
    own_identity = cards[rank][0]
    return {
        "pages": [[worker, *cards[worker][4:]] for worker in members[own_identity]],
        "hosts": [[names[identity], ranks] for identity, ranks in members.items()],
        "own": list(members).index(own_identity),
        "name": f"watch/{cards[0][3]}",
    }


def _find_board(orders: Mapping[str, Any]) -> Board | None:
    """Return where hosts leave their posts; None where there is one host, or no store is known."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    hosts = tuple(Host(name, tuple(ranks)) for name, ranks in orders["hosts"])
    if len(hosts) == 1 or not address or not port.isdecimal():
        return None
    from polylane.runtime.workers.world import SECRET

    secret = os.environ.get(SECRET, "").encode()
    return Board(hosts, orders["own"], address, int(port), orders["name"], secret)


def watch_host(reader: int, on_hang: OnHang, hang_after: float | None, keep: Keep) -> None:
    """Watch the workers of this host, in a process of its own, until they have ended or one hangs.

    Args:
        reader: read end of the pipe from the first worker of the host.
        on_hang, hang_after, keep: the same arguments as of :meth:`HostWatch.start`.
    """
    # torchrun, a terminal or a batch system ends the workers by these: the watch must see how that goes on.
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        orders = json.loads(pipe.readline() or "{}")
        if not orders:
            return
        memories = dict[int, ProgressMemory]()
        for rank, pid, file, stacks in orders["pages"]:
            with suppress(OSError):  # it has ended already
                memories[rank] = ProgressMemory.of_process(pid, file, stacks)
        if not memories:
            return
        pids = {rank: pid for rank, pid, *_ in orders["pages"]}
        if (board := _find_board(orders)) is None:
            _watch_until_end(pipe, HangWatch(memories, on_hang, hang_after, keep), pids, keep)
            return
        _silence_store()
        joint = JointWatch(board, memories, on_hang, hang_after, keep)
        if (has_ended := _watch_until_end(pipe, joint, pids, keep)) is not None:
            joint.end(END_SECONDS, has_ended)


def _silence_store() -> None:
    """Have torch's own warnings about its store, of which it writes many, go nowhere, but not what the watch says."""
    sys.stderr.flush()
    sys.stderr = open_output(os.dup(2), "stderr")
    put_work_first()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _watch_until_end(pipe: BinaryIO, watch: HangWatch, pids: Mapping[int, int], keep: Keep) -> bool | None:
    """Look at the workers again and again; return whether they have ended well, None where this watch ends them."""
    has_told = has_ended = False
    while not select.select([pipe], [], [], LOOK_SECONDS)[0]:
        gone = [rank for rank, pid in pids.items() if read_state(pid) in ENDED_STATES]
        if gone and not has_told:
            has_told = True
            if len(gone) < len(pids):
                sentence = f"rank {gone[0]} (process {pids[gone[0]]}) has ended before the others"
                keep(watch.report_failure(gone[0], sentence))
        if len(gone) == len(pids):
            break
        if not _look(watch.look_at_calls if gone else watch.look, pids, watch.spread_seconds):
            return None
    else:
        has_ended = bool(pipe.readline())
    # The others may come to a call that the first worker of the host, which had the pipe, never makes.
    while any(read_state(pid) not in ENDED_STATES for pid in pids.values()):
        if not _look(watch.look_at_calls, pids, watch.spread_seconds):
            return None
        time.sleep(REST_SECONDS)
    return has_ended


def _look(look: Callable[[], None], pids: Mapping[int, int], spread_seconds: float) -> bool:
    """Look at the workers; return False once they are to end, which was said so many seconds before."""
    try:
        look()
    except CallsDiffer as error:  # each of them raises it
        say_at_once(str(error))
        return False
    except WorkerHung as error:
        say_at_once(str(error))
        time.sleep(spread_seconds)
        for rank in error.ranks:
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        return False
    return True
