"""A worker's part in torchrun's ways to end: signals, peers that die, and an agent that dies.

A thread waits for all of these, since the main thread may be inside a backend's wait, where Python runs no signal
handler. What the thread does, it does without the main thread.

    the agent is told to end (SIGTERM, SIGHUP)    it sends the signal to all its workers: see :mod:`.stop_request`
    a worker dies                                 the first living worker of its host names it; the agent ends them all
    the agent dies (SIGKILL)                      its workers end at once: nobody would restart or end them
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from polylane.output import say_at_once
from polylane.parent_death import read_status
from polylane.runtime.workers.launch_environment import Launch, is_first_of_host
from polylane.runtime.workers.parent_tie import tie_to_agent
from polylane.runtime.workers.stop_request import (
    STOP_SIGNALS,
    Stopped,
    StopRequest,
    describe_request,
    is_second,
    list_heeded,
    restore_signals,
)

if TYPE_CHECKING:  # this module is imported before torch
    from torch._C._distributed_c10d import Store

HANDLED = (*STOP_SIGNALS, signal.SIGINT)

# Workers that are told to end stay this long: each looks for a dead peer first, and must not take them for one.
LINGER_SECONDS = 0.3


class TorchrunWorker:
    """This process among the workers that torchrun's agent started on this host.

    Args:
        launch: which worker this process is.
        stop: this worker's stop request.
        grace: seconds from a request to the end.
        explain_end: called with the signal that ends the run; returns what is said of it.
    """

    def __init__(self, launch: Launch, stop: StopRequest, grace: float, explain_end: Callable[[int], str]) -> None:
        self._launch, self._stop, self._grace, self._explain_end = launch, stop, grace, explain_end
        self._rank, self._is_first_of_host = launch.rank, is_first_of_host()
        self._store: Store | None = None
        self._waiting_store: Store | None = None  # of the main thread: a client is locked while it waits
        self._peers: dict[int, int] = {}  # file descriptor of a living peer's process -> its rank
        self._dead: dict[int, int | None] = {}  # rank -> exit code, None where it is not known
        self._pids: dict[int, int] = {}
        self._someone_died = threading.Event()
        self._naming = threading.Lock()
        self._has_named = False
        self._loss = ""
        self._size = 1
        self._requested_at: float | None = None
        self._wake, self._woken = os.pipe()
        self._agent: int | None = None  # file descriptor of the agent's process
        self._agent_pid = 0
        self._is_closed = False
        self._kills_before = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager: handle signals, and tie this worker to its agent; open it before anything takes long."""
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        # The thread is told by the wake-up descriptor.
        heeded = (*list_heeded(), signal.SIGINT)
        handlers = {number: signal.signal(number, lambda number, frame: None) for number in heeded}
        os.register_at_fork(after_in_child=_restore_signals)
        self._tie_to_agent()
        thread = threading.Thread(target=self._watch, name="polylane-torchrun", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._is_closed = True
            os.write(self._woken, b"\0")
            thread.join()

    def _tie_to_agent(self) -> None:
        if (agent := tie_to_agent()) is None:
            return
        with suppress(AttributeError, OSError):  # not Linux
            self._agent, self._agent_pid = os.pidfd_open(agent), agent

    def meet_peers(self, store: Store, size: int) -> None:
        """Learn which processes the agent's other workers are; a collective of all workers of all agents.

        Args:
            store: store of all workers, with entries of this attempt only.
            size: number of workers, over all hosts.
        """
        from polylane.runtime.workers.out_of_memory import count_system_kills

        self._kills_before, self._size = count_system_kills(), size
        agent = f"{os.environ.get('GROUP_RANK', '')} {os.getppid()}"
        store.set(f"process/{self._rank}", f"{agent} {os.getpid()}")
        cards = store.multi_get([f"process/{rank}" for rank in range(size)])
        for rank, card in enumerate(cards):
            peer_agent, _, process = card.decode().rpartition(" ")
            if peer_agent == agent:
                self._pids[rank] = int(process)
        self._store = store.clone()  # type: ignore[attr-defined]  # the main thread's may be inside a wait
        self._waiting_store = store.clone()  # type: ignore[attr-defined]
        for rank, pid in self._pids.items():
            if rank != self._rank:
                try:
                    self._peers[os.pidfd_open(pid)] = rank
                except ProcessLookupError:
                    self._dead[rank] = None
                except (AttributeError, OSError):  # not Linux: nobody is named
                    continue
        os.write(self._woken, b"\0")  # the thread waits for the peers as well

    # ---- endings -----------------------------------------------------------------------------------------------------

    def mark_reported(self) -> None:
        """Record that this worker ends and has said why, so that no other one says that it died."""
        if self._store is not None:
            with suppress(RuntimeError):  # the agent and its store are gone
                self._store.set(f"reported/{self._rank}", "")

    def wait_for_first(self) -> None:
        """Wait until rank 0 has written its files: an agent ends its workers once one has left with a code but 0."""
        if self._waiting_store is not None:
            with suppress(RuntimeError):  # the agent and its store are gone, or rank 0 takes too long
                if self._rank == 0:
                    self._waiting_store.set("finished", "")
                self._waiting_store.wait(["finished"], timedelta(seconds=max(self._grace, LINGER_SECONDS)))

    def name_lost_peer(self, seconds: float, loss: str, ask: Callable[[], str | None]) -> None:
        """Print which worker of this host died without a word, or what was lost; the first worker of a host prints.

        Args:
            seconds: how long to wait for a death: a lost connection may be seen before the end of the process.
            loss: what this worker lost, where no worker of this host died.
            ask: returns which workers of other hosts have ended, "" where that is not known, and None where somebody
                else has named what was lost; called where no worker of this host died.
        """
        self._loss = loss
        if not self._someone_died.wait(seconds):
            if (answer := ask()) is None:
                with self._naming:
                    self._has_named = True
            elif answer:
                self._loss = f"{answer} ended ({loss})"
        self._name_dead()
        self._name_loss()

    def _name_loss(self) -> bool:
        """Say that a worker of another host was lost, once; return whether one was, and none of this host."""
        with self._naming:
            if self._loss and not (self._has_named or self._has_peer_failed() or self._has_anyone_reported()):
                self._has_named = True
                if self._is_first_of_host:
                    say_at_once(f"worker {self._rank} lost a worker of another host: {self._loss}")
            return bool(self._loss)

    def _name_dead(self) -> bool:
        """Name the first worker that died without a word, once; return whether there is one."""
        with self._naming:
            silent = [rank for rank, code in sorted(self._dead.items()) if self._is_silent(rank, code)]
            if silent and not self._has_named:
                self._has_named = True
                if self._rank == min((rank for rank in self._pids if rank not in self._dead), default=self._rank):
                    say_at_once(self._describe_death(silent[0]))
            return bool(silent)

    def _has_anyone_reported(self) -> bool:
        try:
            return self._store is None or any(self._store.check([f"reported/{rank}"]) for rank in range(self._size))
        except RuntimeError:  # the agent and its store are gone
            return True

    def _has_peer_failed(self) -> bool:
        """Return whether a worker of this host has ended otherwise than well, or as a signal told it."""
        if self._store is None:  # nobody has met: the agent's other children are all that can be seen
            living = 0 if self._agent is None else len(_children_of(self._agent_pid))
            return 0 < living < self._launch.local_size
        return any(code is None or (code != 0 and code - 128 not in HANDLED) for code in self._dead.values())

    def _is_silent(self, rank: int, code: int | None) -> bool:
        if code is not None and code - 128 in HANDLED:  # it was told to end
            return False
        try:
            return self._store is None or not self._store.check([f"reported/{rank}"])
        except RuntimeError:  # the agent and its store are gone
            return False

    def _describe_death(self, rank: int) -> str:
        from polylane.runtime.workers.failure import Failure

        return str(Failure.of_exit(rank, self._dead[rank], self._kills_before).to_exception())

    def _end(self, number: int, reason: str = "") -> None:
        """End this process at once, by a signal that it was sent."""
        if self._is_first_of_host:
            say_at_once(str(Stopped(number, reason or self._explain_end(number))))
        else:
            time.sleep(LINGER_SECONDS)
        time.sleep(LINGER_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(128 + number)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            ready = self._wait()
            if self._is_closed:
                return
            if self._agent in ready:
                os.kill(os.getpid(), signal.SIGKILL)
            # Deaths before signals: the agent sends SIGTERM to all workers because one of them died.
            for descriptor in [ready_descriptor for ready_descriptor in ready if ready_descriptor in self._peers]:
                self._bury(descriptor)
            if self._wake in ready:
                for number in os.read(self._wake, 1024):
                    if number in HANDLED:
                        self._receive(number)
            if self._requested_at is not None and time.monotonic() - self._requested_at > self._grace:
                self._end(self._stop.number, f"no checkpoint was complete within {self._grace:g} s (--grace)")

    def _wait(self) -> list[int]:
        """Wait for a signal, a death or the end of the grace; return the descriptors that are ready."""
        poll = select.poll()
        for descriptor in [self._wake, *self._peers, *([] if self._agent is None else [self._agent])]:
            poll.register(descriptor, select.POLLIN)
        seconds_left = None if self._requested_at is None else self._requested_at + self._grace - time.monotonic()
        return [ready for ready, _ in poll.poll(None if seconds_left is None else max(seconds_left * 1000 + 1, 0))]

    def _bury(self, descriptor: int) -> None:
        rank = self._peers.pop(descriptor)
        os.close(descriptor)
        code = _exit_code(self._pids[rank])
        self._dead[rank] = code
        self._someone_died.set()
        # Who ends with code 0 may just be done; any other end is told, unless that worker has told it.
        if code != 0:
            self._name_dead()

    def _receive(self, number: int) -> None:
        # The agent ends this worker because another one failed: there is nobody to save with, and no more to say.
        if self._name_dead() or self._has_peer_failed() or self._name_loss():
            time.sleep(LINGER_SECONDS)
            os._exit(1)
        received_at = time.monotonic()
        if not self._stop.waits_for_save:
            self._end(number)
        elif self._requested_at is None:
            self._requested_at = received_at
            self._stop.set(number)
            if self._is_first_of_host:
                say_at_once(describe_request(number, self._grace))
        elif is_second(number, received_at - self._requested_at):
            self._end(number)


def identify_launch() -> str:
    """Return what all attempts of one start of torchrun's agent have in common; empty for other workers."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    started = read_status(os.getppid())  # its 20th field is the time, so that a later process of this id is another
    return f"{run} {os.getppid()} {started[19] if len(started) > 19 else ''}" if run else ""


def _restore_signals() -> None:
    """Have every signal end a process that this worker forks, such as a loader's, without a traceback."""
    restore_signals()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _children_of(pid: int) -> list[int]:
    """Return the process ids of the living children of a process; none where they cannot be read."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for fields in lists for child in fields]
    return [child for child in children if read_status(child)[:1] not in ([], ["Z"])]


def _exit_code(pid: int) -> int | None:
    """Return how a process ended that its parent has not waited for yet, as ``Popen.returncode``; None if unknown."""
    fields = read_status(pid)
    if not fields or fields[0] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(fields[-1]))
