"""Host board: the posts of all hosts' watching processes, in the store over which torchrun's agents met.

Every host has a place on the board. A thread writes what this host says into its place, reads the places of others, and
does nothing else: the store may take for ever to answer, and the watch is then told just that.

    the host that judges     reads all places
    any other host           reads those of the hosts before it, down to the first one that answers: that one judges

So each host reads one place, mostly. The host with the lowest number judges; if it is silent, the next one does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

from polylane.diagnosis.host_post import HostPost

PERIOD_SECONDS = 1.0  # between two posts while all goes on
HURRY_SECONDS = 0.2  # between two posts while something stands still
GAP_SECONDS = 3.0  # of a longer time between two answers of the store it is not known whether hosts were silent
CONNECT_SECONDS = 30.0  # for the store to accept the connection, and then for each of its answers
RETRY_SECONDS = 2.0  # between two connections with a store that has failed: a host that starts again needs some


class BoardStore(Protocol):
    """The calls of a store that the board needs; see :class:`torch.distributed.Store`."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return values that are there."""


@dataclass(frozen=True)
class Host:
    """One host of a training.

    Attributes:
        name: its name for people, of which no other host has the same.
        ranks: ranks of its workers, ascending.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Board:
    """Which hosts a training runs on, and where they leave their posts.

    Attributes:
        hosts: all hosts of the training, by their numbers.
        own: number of this host among them.
        address, port: where the store listens, as workers of all hosts reach it.
        name: name of the training and of this start of it, which keys of others do not begin with.
        secret: secret that the hosts share; empty: nothing is proved.
    """

    hosts: tuple[Host, ...]
    own: int
    address: str
    port: int
    name: str
    secret: bytes = b""

    @property
    def store_name(self) -> str:
        """What the store is called in a sentence."""
        return f"torchrun's store at {self.address}:{self.port}"

    def connect(self) -> BoardStore:
        """Connect with the store."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=CONNECT_SECONDS)
        return PrefixStore(self.name, TCPStore(self.address, self.port, None, False, timeout))  # type: ignore[return-value]


@dataclass(frozen=True)
class Heard:
    """What the other hosts have last published.

    Attributes:
        judge: number of the host that judges.
        posts: by number of a host, its latest post; without hosts that have said nothing.
        silences: by number of a host that is read, the seconds since it said something new.
        unanswered: seconds since the store has answered.
    """

    judge: int
    posts: dict[int, HostPost]
    silences: dict[int, float]
    unanswered: float


class HostBoard:
    """This host's end of the board.

    Args:
        board: the hosts, and the store.
        patience: seconds after which a host that says nothing new does not judge any more; may be changed.
    """

    def __init__(self, board: Board, patience: float) -> None:
        self._board, self.patience = board, patience
        self._lock = threading.Lock()
        self._post, self._count, self._hurries = HostPost(), 0, False
        self._judge = 0
        self._posts, self._heard_at = dict[int, HostPost](), dict[int, float]()
        self._existing = set[int]()
        self._answered_at = time.monotonic()
        self._wakes, self._ends, self._written = threading.Event(), threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="polylane-board", daemon=True)

    def start(self) -> None:
        """Begin to write and read."""
        self._thread.start()

    def post(self, post: HostPost, hurries: bool) -> None:
        """Say something; the post gets the next number each time that it is written.

        Args:
            post: what this host says from now on.
            hurries: whether something stands still, so that others should hear of it soon.
        """
        with self._lock:
            wakes = hurries and (not self._hurries or replace(post, ranks=()) != replace(self._post, ranks=()))
            self._post, self._hurries = post, hurries
        if wakes:
            self._wakes.set()

    def end(self, seconds: float, post: HostPost) -> None:
        """Say that this host's workers have ended, and write no more.

        Args:
            seconds: longest wait for the store.
            post: what others read of this host from then on: that its workers have ended, and how.
        """
        with self._lock:
            self._post = post
        self._ends.set()
        self._wakes.set()
        self._thread.join(seconds)

    def heard(self) -> Heard:
        """Return what the other hosts have last published."""
        with self._lock:
            silences = {host: self._answered_at - at for host, at in self._heard_at.items()}
            unanswered = time.monotonic() - self._answered_at
            return Heard(self._judge, dict(self._posts), silences, unanswered)

    def pass_over(self, seconds: float) -> None:
        """Leave a time out of account in which this process itself did not run."""
        with self._lock:
            self._answered_at += seconds
            self._heard_at = {host: at + seconds for host, at in self._heard_at.items()}

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                store = self._board.connect()
                while True:
                    self.exchange(store)
                    if self._ends.is_set():
                        return
                    self._wakes.wait(HURRY_SECONDS if self._hurries else PERIOD_SECONDS)
                    self._wakes.clear()
            except RuntimeError:  # the store is gone, or was not there yet
                if self._ends.wait(RETRY_SECONDS):
                    return

    def exchange(self, store: BoardStore) -> None:
        """Write this host's place, and read those of others, once.

        Raises:
            RuntimeError: the store is not there.
        """
        with self._lock:
            self._count += 1
            post, judge = replace(self._post, number=self._count), self._judge
        own_host, all_hosts = self._board.own, range(len(self._board.hosts))
        store.set(f"{own_host}", post.to_bytes(self._place(own_host), self._board.secret))
        hosts = [host for host in (all_hosts if judge == own_host else range(judge + 1)) if host != own_host]
        self._existing |= {host for host in hosts if host not in self._existing and store.check([f"{host}"])}
        existing_hosts = [host for host in hosts if host in self._existing]
        texts = store.multi_get([f"{host}" for host in (*existing_hosts, own_host)])
        self._read(hosts, dict(zip(existing_hosts, texts, strict=False)))

    def _read(self, hosts: Sequence[int], texts: dict[int, bytes]) -> None:
        new = dict[int, HostPost]()
        for host, text in texts.items():
            try:
                new[host] = HostPost.from_bytes(
                    bytes(text), self._place(host), self._board.hosts[host].ranks, self._board.secret
                )
            except ValueError:  # not of that host: as if it had said nothing
                continue
        now = time.monotonic()
        with self._lock:
            if (gap := now - self._answered_at) > GAP_SECONDS:
                self._heard_at = {host: at + gap for host, at in self._heard_at.items()}
            self._answered_at = now
            for host in hosts:
                old_post = self._posts.get(host, HostPost())
                if host in new and new[host].number > old_post.number:
                    self._posts[host] = new[host]
                    self._heard_at[host] = now
                self._heard_at.setdefault(host, now)
            self._judge = next(host for host in range(self._board.own + 1) if self._may_judge(host, now))

    # A host whose own workers wait for those of another one cannot tell a dead link between the two from a rank that is
    # late there, nor see calls that differ: one that reads all posts must be left to judge when the first is gone.
    def _may_judge(self, host: int, now: float) -> bool:
        if host == self._board.own:
            return True
        has_ended = self._posts.get(host, HostPost()).has_ended
        return not has_ended and now - self._heard_at.get(host, now) < self.patience

    def _place(self, host: int) -> str:
        return f"{self._board.name} {host}"
