"""Rendezvous: how workers find out which of them share a host, and how those of one host connect.

They use what connects them already for that. The sockets have names only until all are connected, in folders that no
other user may enter: nobody else can as much as knock. Who does is let in only as the same user, and with the token.
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
from polylane.runtime.transport.serialization import serializable
from polylane.runtime.transport.shared_memory.blocks import max_block_bytes
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.workers.world import TIMEOUT, World

LONGEST_BASE = 70  # bytes of a folder's name in which a socket's folder may be
CONNECT_SECONDS = 5.0  # for a peer that is there to connect; only waited for where one could not
_HELLO = struct.Struct("=I16s")  # the rank, and what only the workers know of each other
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


@serializable
@dataclass(frozen=True)
class WorkerCard:
    """What a worker tells all others of itself before they connect.

    Attributes:
        host: equal for those that share memory and can reach one another by local sockets.
        user: whose process it is.
        cores: that it may run on.
        name: of the socket at which it is to be reached.
        token: what a peer must say there.
        why_unable: why it cannot share memory; None where it can.
        requested_transport: which transport its user asks for.
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
    """What all workers know of one another, and this one's listening socket.

    Attributes:
        folder: where its name is; None where it has none.
        cards: what every worker said, by rank.
    """

    listener: socket.socket | None
    folder: str | None = None
    cards: tuple[WorkerCard, ...] = field(default=())

    @classmethod
    def meet_workers(cls, world: World, asked: str | None = None) -> HostRendezvous:
        """Every worker calls it, and says which transport its user asks for."""
        unable = why_cannot_share(world)
        listener = folder = None
        if unable is None:
            listener, folder, unable = _open_listener(2 * world.size)
        name = _socket_path(folder) if folder is not None else ""
        card = WorkerCard(host_identity(), os.getuid(), _count_cores(), name, secrets.token_bytes(16), unable, asked)
        met = cls(listener, folder)
        try:
            met.cards = tuple(world.all_gather_object(card))
        except BaseException:
            met.stop_listening()
            raise
        return met

    def stop_listening(self) -> None:
        """Take nobody in any more."""
        if self.listener is not None:
            self.listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _open_listener(backlog: int) -> tuple[socket.socket | None, str | None, str | None]:
    """A socket and its folder; or why there can be none: the others are to hear of it, not to wait."""
    listener = folder = None
    try:
        base = tempfile.gettempdir()
        # The system bounds the names of sockets, not those of folders.
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
    """Why this worker cannot share memory with others; None where it can."""
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
    """Names the running system and its network: containers of one system with networks of their own are two hosts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        return (socket.gethostname(),)


def connect_hub(world: World, meeting: HostRendezvous, hosts: Sequence[Hashable]) -> MessageHub | str:
    """Connect with all workers of the same host; every worker calls it.

    Args:
        world: this worker among all.
        meeting: what the workers know of one another.
        hosts: of every rank: equal for those that are to connect.

    Returns:
        The hub, or where any worker could not connect, the same reason at all.
    """
    here = [rank for rank in range(world.size) if hosts[rank] == hosts[world.rank]]
    connections: dict[int, socket.socket] = {}
    # Connecting does not wait for the other side to accept: no order of ranks can be a deadlock.
    own = _connect_lower_ranks(world.rank, here, meeting, connections) or _accept_higher_ranks(
        world.rank, here, meeting, connections
    )
    trouble = _first_trouble(world, own)
    meeting.stop_listening()
    if trouble is not None:
        for connection in connections.values():
            connection.close()
        return trouble
    spins = len(here) <= min(meeting.cards[rank].cores for rank in here)
    return MessageHub(world.rank, connections, max_block_bytes(len(here)), TIMEOUT.total_seconds(), spins)


def reconnect_hub(world: World, hosts: Sequence[Hashable]) -> MessageHub:
    """A hub once more, after the one of before was closed; every worker calls it.

    Args:
        world: this worker among all.
        hosts: of every rank: equal for those that are to connect.

    Raises:
        PolylaneError: any worker cannot connect.
    """
    meeting = HostRendezvous.meet_workers(world)
    unable = [
        f"rank {rank}: {card.why_unable}" for rank, card in enumerate(meeting.cards) if card.why_unable is not None
    ]
    met = unable[0] if unable else connect_hub(world, meeting, hosts)
    meeting.stop_listening()
    if isinstance(met, str):
        raise PolylaneError(f"the workers cannot share memory any more: {met}; make the job anew in a new process")
    return met


def _first_trouble(world: World, trouble: str | None) -> str | None:
    """The first trouble that any worker had."""
    troubles: list[str | None] = world.all_gather_object(trouble)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(troubles) if each is not None), None)


def _connect_lower_ranks(
    rank: int, here: Sequence[int], meeting: HostRendezvous, into: dict[int, socket.socket]
) -> str | None:
    """Connect to all lower ranks; the reason where one cannot be reached."""
    for peer in (other for other in here if other < rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(CONNECT_SECONDS)
        into[peer] = connection
        try:
            connection.connect(meeting.cards[peer].name)
            if _peer_user(connection) != os.getuid():
                return f"rank {peer} is another user's"
            connection.send(_HELLO.pack(rank, meeting.cards[peer].token))
        except OSError as error:
            return f"cannot reach rank {peer} ({error.strerror or error})"
    return None


def _accept_higher_ranks(
    rank: int, here: Sequence[int], meeting: HostRendezvous, into: dict[int, socket.socket]
) -> str | None:
    """Take the connections of all higher ranks; the reason where one does not come."""
    awaited = {other for other in here if other > rank}
    listener = meeting.listener
    try:
        while awaited and listener is not None:
            listener.settimeout(CONNECT_SECONDS)
            connection, _ = listener.accept()
            peer = (
                _read_introduction(connection, meeting.cards[rank].token)
                if _peer_user(connection) == os.getuid()
                else None
            )
            if peer in awaited:
                awaited.remove(peer)
                into[peer] = connection
            else:  # a stranger
                connection.close()
    except OSError as error:
        return f"no connection from rank {min(awaited)} ({error.strerror or error})"
    return None


def _read_introduction(connection: socket.socket, token: bytes) -> int | None:
    """The rank that a peer says it is; None where it does not know the token."""
    connection.settimeout(CONNECT_SECONDS)
    said = connection.recv(_HELLO.size)
    if len(said) != _HELLO.size:
        return None
    peer, proof = _HELLO.unpack(said)
    return int(peer) if secrets.compare_digest(proof, token) else None


def _peer_user(connection: socket.socket) -> int:
    """Whose process is at the other end, as the system tells."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why_no_shared_memory(cards: Sequence[WorkerCard]) -> str | None:
    """Why not all workers can share memory; None where they can."""
    for rank, card in enumerate(cards):
        if card.why_unable is not None:
            return f"rank {rank}: {card.why_unable}"
        if card.host != cards[0].host:
            return f"ranks 0 and {rank} are on different hosts"
        if card.user != cards[0].user:
            return f"ranks 0 and {rank} are different users'"
    return None
