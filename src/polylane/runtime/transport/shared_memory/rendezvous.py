"""Rendezvous of the workers of one host: which workers share it, and how they connect by Unix sockets.

    step                                                                  over
    1  every worker listens at a socket in a folder of its own            -
    2  cards of all workers are gathered: host, user, socket, token       world.all_gather_object
    3  each worker connects to lower ranks of its host, accepts higher    Unix sockets
    4  all learn whether all have connected; sockets' names are removed   world.all_gather_object

Other users may not enter the folders. A connection is accepted only from the same user, and with the token.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polylane.errors import PolylaneError
from polylane.runtime.plain_data.serialization import serializable
from polylane.runtime.transport.shared_memory.blocks import max_block_bytes
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.workers.world import TIMEOUT, World, affine_cores

LONGEST_BASE = 70  # longest path in bytes of the folder for temporary files: the path of a socket is limited to 108
CONNECT_SECONDS = 5.0  # timeout of a connection; only reached if a peer failed to connect
_HELLO = struct.Struct("=I16s")  # the rank of the worker that connects, and the token of the one that listens
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


@serializable
@dataclass(frozen=True)
class WorkerCard:
    """What a worker sends all others about itself before they connect.

    Attributes:
        host: host identity, equal for workers that share memory and can reach one another by Unix sockets.
        user: id of the user who runs the process.
        cores: number of cores that the process may use.
        name: path of the socket at which the worker listens.
        token: 16 random bytes that a peer must send when it connects.
        why_unable: why the worker cannot share memory, in words; None if it can.
        requested_transport: value of ``POLYLANE_TRANSPORT`` at the worker, or None.
    """

    host: Hashable
    user: int
    cores: int
    name: str
    token: bytes
    why_unable: str | None
    requested_transport: str | None


@dataclass
class HostRendezvous:
    """The cards of all workers, and this worker's listening socket.

    Attributes:
        listener: this worker's listening socket, or None if it cannot share memory.
        folder: folder with the socket's name, or None without a socket.
        cards: card of every worker, by rank.
    """

    listener: socket.socket | None
    folder: str | None = None
    cards: tuple[WorkerCard, ...] = field(default=())

    @classmethod
    def meet_workers(cls, world: World, request: str | None = None) -> HostRendezvous:
        """Listen, and gather the cards of all workers; a collective of the world.

        Args:
            world: this worker among all workers.
            request: transport that this worker's user requests, or None.
        """
        unable = why_cannot_share(world)
        listener = folder = None
        if unable is None:
            listener, folder, unable = _open_listener(2 * world.size)
        name = _socket_path(folder) if folder is not None else ""
        card = WorkerCard(host_identity(), os.getuid(), affine_cores(), name, secrets.token_bytes(16), unable, request)
        met = cls(listener, folder)
        try:
            met.cards = tuple(world.all_gather_object(card))
        except BaseException:
            met.stop_listening()
            raise
        return met

    def stop_listening(self) -> None:
        """Close the listening socket and remove its folder; idempotent."""
        if self.listener is not None:
            self.listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _open_listener(backlog: int) -> tuple[socket.socket | None, str | None, str | None]:
    """Return (socket, folder, None), or (None, None, reason): the reason is gathered, so that no peer waits."""
    listener = folder = None
    try:
        base = tempfile.gettempdir()
        # The system limits the length of sockets' paths, not that of folders.
        folder = tempfile.mkdtemp(prefix="polylane-", dir=base if len(os.fsencode(base)) < LONGEST_BASE else "/tmp")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_socket_path(folder))
        listener.listen(backlog)
    except OSError as error:
        HostRendezvous(listener, folder).stop_listening()
        return None, None, f"its system lets it listen at no local socket ({error.strerror or error})"
    return listener, folder, None


def _socket_path(folder: str) -> str:
    return os.path.join(folder, "hub")


def why_cannot_share(world: World) -> str | None:
    """Return why this worker cannot share memory with others, or None if it can."""
    if world.device.type != "cpu" or world.backend != "gloo":
        return f"its tensors are on {world.device.type}, over {world.backend}"
    if not (hasattr(socket, "SOCK_SEQPACKET") and hasattr(socket, "SO_PEERCRED") and hasattr(select, "epoll")):
        return "its system is not Linux"
    try:
        os.close(os.memfd_create("polylane"))
    except OSError as error:
        return f"its system makes no shared memory ({error.strerror})"
    return None


def host_identity() -> tuple[str, ...]:
    """Return the identity of the kernel and the network namespace: containers with own networks are two hosts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        return (socket.gethostname(),)


def connect_hub(world: World, meeting: HostRendezvous, hosts: Sequence[Hashable]) -> MessageHub | str:
    """Connect with all workers of the same host; a collective of the world.

    Args:
        world: this worker among all workers.
        meeting: cards of all workers, and this worker's listening socket.
        hosts: host of every rank; equal for ranks that connect.

    Returns:
        The hub, or if any worker could not connect, the same reason at all workers.
    """
    host_ranks = [rank for rank in range(world.size) if hosts[rank] == hosts[world.rank]]
    connections: dict[int, socket.socket] = {}
    # The backlog takes connections before they are accepted: connecting first cannot deadlock in any order of ranks.
    reason = _connect_lower_ranks(world.rank, host_ranks, meeting, connections) or _accept_higher_ranks(
        world.rank, host_ranks, meeting, connections
    )
    trouble = _first_reason(world.all_gather_object(reason))
    meeting.stop_listening()
    if trouble is not None:
        for connection in connections.values():
            connection.close()
        return trouble
    # Polling before sleeping pays only if no peer needs this core.
    spins = len(host_ranks) <= min(meeting.cards[rank].cores for rank in host_ranks)
    return MessageHub(world.rank, connections, max_block_bytes(len(host_ranks)), TIMEOUT.total_seconds(), spins)


def reconnect_hub(world: World, hosts: Sequence[Hashable]) -> MessageHub:
    """Build a new hub after the previous one was closed; a collective of the world.

    Args:
        world: this worker among all workers.
        hosts: host of every rank; equal for ranks that connect.

    Raises:
        PolylaneError: a worker cannot connect any more.
    """
    meeting = HostRendezvous.meet_workers(world)
    met = _first_reason([card.why_unable for card in meeting.cards]) or connect_hub(world, meeting, hosts)
    meeting.stop_listening()
    if isinstance(met, str):
        raise PolylaneError(f"the workers cannot share memory any more: {met}; make the job anew in a new process")
    return met


def _first_reason(reasons: Sequence[str | None]) -> str | None:
    """Return the first of the ranks' reasons, with its rank; None if there is none."""
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def _connect_lower_ranks(
    rank: int, host_ranks: Sequence[int], meeting: HostRendezvous, into: dict[int, socket.socket]
) -> str | None:
    """Connect to all lower ranks of this host; return the reason if one cannot be reached, else None."""
    for peer in (member for member in host_ranks if member < rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(CONNECT_SECONDS)
        into[peer] = connection
        try:
            connection.connect(meeting.cards[peer].name)
            # Before the token is sent: another user's process may have taken the socket's path.
            if _peer_user(connection) != os.getuid():
                return f"rank {peer} is another user's"
            connection.send(_HELLO.pack(rank, meeting.cards[peer].token))
        except OSError as error:
            return f"cannot reach rank {peer} ({error.strerror or error})"
    return None


def _accept_higher_ranks(
    rank: int, host_ranks: Sequence[int], meeting: HostRendezvous, into: dict[int, socket.socket]
) -> str | None:
    """Accept the connections of all higher ranks of this host; return the reason if one is missing, else None."""
    awaited = {member for member in host_ranks if member > rank}
    listener = meeting.listener
    try:
        while awaited and listener is not None:
            listener.settimeout(CONNECT_SECONDS)
            connection, _ = listener.accept()
            peer = None
            if _peer_user(connection) == os.getuid():
                peer = _read_introduction(connection, meeting.cards[rank].token)
            if peer in awaited:
                awaited.remove(peer)
                into[peer] = connection
            else:  # not a worker of this job
                connection.close()
    except OSError as error:
        return f"no connection from rank {min(awaited)} ({error.strerror or error})"
    return None


def _read_introduction(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank that a connected peer sends, or None if it does not know the token."""
    connection.settimeout(CONNECT_SECONDS)
    introduction = connection.recv(_HELLO.size)
    if len(introduction) != _HELLO.size:
        return None
    peer, proof = _HELLO.unpack(introduction)
    return int(peer) if secrets.compare_digest(proof, token) else None


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def why_no_shared_memory(cards: Sequence[WorkerCard]) -> str | None:
    """Return why not all workers can share memory, or None if they can."""
    for rank, card in enumerate(cards):
        if card.why_unable is not None:
            return f"rank {rank}: {card.why_unable}"
        if card.host != cards[0].host:
            return f"ranks 0 and {rank} are on different hosts"
        if card.user != cards[0].user:
            return f"ranks 0 and {rank} are different users'"
    return None
