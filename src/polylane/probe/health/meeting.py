"""Meeting of the workers whose health is looked at: what they tell each other, and what their hosts reach and measure.

All of it goes over one store of torch's and plain sockets, so that nothing hangs where a process group would.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from polylane.errors import PolylaneError
from polylane.probe.health.facts import WorkerHealth, time_matmul
from polylane.runtime.workers.launch_environment import Launch

REACH_SECONDS = 5.0  # in which a port of another host must answer
MEET_SECONDS = 60.0  # in which all workers must say what they know
_PINGS, _MESSAGE = 50, b"p" + bytes(1023)
_BLOCK, _SEND_SECONDS = bytes(1 << 20), 0.5
_END = struct.Struct("!d")


@dataclass(frozen=True)
class PairMeasurement:
    """What one host measured of another.

    Attributes:
        source, target: their numbers, in the order of their first ranks.
        problem: why it was not reached; "" where it was.
        latency: seconds of a round trip of 1 KB.
        bandwidth: bytes per second from the source to the target, over one connection.
        clock_ahead: seconds by which the target's clock is ahead, to within the round trip.
    """

    source: int
    target: int
    problem: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0
    clock_ahead: float = 0.0


class Meeting:
    """Where workers meet.

    Args:
        launch: which worker this is.

    Raises:
        PolylaneError: the store of rank 0 is not reached.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch, self._turn = launch, 0
        self._store: Store | None = None
        if launch.size > 1:
            self._store = _open_store(launch)

    def exchange(self, value: Any, seconds: float | None = None) -> list[Any]:
        """Return what every worker has given, by rank; a collective.

        Args:
            value: plain data for JSON.
            seconds: in which all must have given it; None: :data:`MEET_SECONDS`.

        Raises:
            PolylaneError: a worker is silent; the message names the ranks.
        """
        if self._store is None:
            return [value]
        self._turn += 1
        self._store.set(f"health{self._turn}/{self._launch.rank}", json.dumps(value))
        seconds = MEET_SECONDS if seconds is None else seconds
        deadline, values, silent = time.monotonic() + seconds, list[Any](), list[int]()
        for rank in range(self._launch.size):
            key = f"health{self._turn}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
                values.append(json.loads(self._store.get(key)))
            except (RuntimeError, OSError):
                silent.append(rank)
        if silent:
            ranks = ", ".join(map(str, silent))
            raise PolylaneError(f"of {self._launch.size} workers, these say nothing for {seconds:g} s: {ranks}")
        return values

    def measure_speeds(self, facts: Sequence[WorkerHealth]) -> list[WorkerHealth]:
        """Return the facts with the speed of every worker's device; a collective.

        The workers of a host take turns, since they may share its cores.
        """
        seconds = 0.0
        for turn in range(1 + max(worker.local_rank for worker in facts)):
            if self._launch.local_rank == turn:
                seconds = time_matmul(self._launch)
            all_seconds = self.exchange(seconds)
        return [replace(worker, matmul_seconds=s) for worker, s in zip(facts, all_seconds, strict=True)]

    def measure_pairs(self, addresses: Sequence[str], number: int | None) -> list[PairMeasurement]:
        """Have every host reach all others, and measure the links; a collective.

        In every round each host sends to one other and is sent to by one, so that n hosts take n - 1 rounds.

        Args:
            addresses: of the hosts, in the order of their first ranks.
            number: the host that this worker speaks for; None for its further workers.

        Returns:
            The measurements of all hosts.
        """
        server = _AnsweringServer(addresses[number]) if number is not None else None
        entries = self.exchange([number, server.port if server else 0])
        ports = {host: port for host, port in entries if host is not None}
        measurements, count = list[dict[str, Any]](), len(addresses)
        for distance in range(1, count):
            if number is not None:
                target = (number + distance) % count
                measurements.append(vars(measure_link(number, target, addresses[target], ports[target])))
            self.exchange(None)  # before the next round
        everything = self.exchange(measurements)
        if server is not None:
            server.close()
        return [PairMeasurement(**row) for rows in everything for row in rows]


def _open_store(launch: Launch) -> Store:
    from torch.distributed.rendezvous import rendezvous

    launch.check_meeting_place()
    try:
        store: Store = next(rendezvous("env://", launch.rank, launch.size, timeout=timedelta(seconds=MEET_SECONDS)))[0]
    except (RuntimeError, OSError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        why = str(error).splitlines()[0][:200]
        raise PolylaneError(
            f"rank {launch.rank} on {socket.gethostname()} does not reach rank 0's store at {address} ({why}): check "
            "the address, the port and firewalls"
        ) from None
    return store


class _AnsweringServer:
    """Answers other hosts at one port: the time, echoes, and that so many bytes have arrived."""

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        self.port = 0
        with suppress(OSError):  # an address that is none of this host's: who tries to reach it says so
            self._socket = socket.create_server((address, 0))
            self.port = self._socket.getsockname()[1]
            threading.Thread(target=self._accept, args=(self._socket,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        if self._socket is not None:
            self._socket.close()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            if len(_receive(connection, len(_MESSAGE))) < len(_MESSAGE):
                return
            connection.sendall(_END.pack(time.time()))
        received = 0
        while data := connection.recv(1 << 20):
            received += len(data)
        connection.sendall(_END.pack(received))


def _receive(connection: socket.socket, count: int) -> bytes:
    parts, missing = list[bytes](), count
    while missing and (data := connection.recv(missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def measure_link(source: int, target: int, address: str, port: int) -> PairMeasurement:
    """Measure the link to another host, or say why it is not reached."""
    if not port:
        return PairMeasurement(source, target, f"{address or 'no address'} is not an address of that host")
    try:
        with socket.create_connection((address, port), timeout=REACH_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = [_time_trip(connection) for _ in range(_PINGS)]
            latency, ahead = min(trips)
            start, sent = time.perf_counter(), 0
            while time.perf_counter() - start < _SEND_SECONDS:
                connection.sendall(_BLOCK)
                sent += len(_BLOCK)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(4 * REACH_SECONDS)
            _receive(connection, _END.size)  # all has arrived
            seconds = time.perf_counter() - start
    except OSError as error:
        return PairMeasurement(source, target, f"{address}:{port}: {error.strerror or error}")
    return PairMeasurement(source, target, "", latency, sent / seconds, ahead)


def _time_trip(connection: socket.socket) -> tuple[float, float]:
    """Return the seconds of a round trip, and by how many the other clock is ahead."""
    begin = time.time()
    connection.sendall(_MESSAGE)
    (their_time,) = _END.unpack(_receive(connection, _END.size))
    end = time.time()
    return end - begin, their_time - (begin + end) / 2
