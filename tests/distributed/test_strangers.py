"""Another user of the host meets a closed door: he takes no worker's place, and nothing that he sends runs."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polylane.errors import PolylaneError, WorkerFailed
from polylane.runtime.plain_data import plain_objects
from polylane.runtime.transport import c10d
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.workers.file_store import MeetingPlace
from polylane.runtime.workers.started_worker import StartedWorker, WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets
from tests.support.workers import child_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
torch.set_num_threads(1)

NOBODY = 65534
TRIES = 8


class Bomb:
    """A pickle that leaves a trace where it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@contextmanager
def stranger(attack: Callable[[set[int], set[str]], None]) -> Iterator[None]:
    """Attack every socket at which a process of this one's listens, as another user where this one may become one."""
    ours = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        seen = set[str]()
        while True:
            ports, names = listening(ours, but=os.getpid())
            if new := {str(port) for port in ports} - seen | names:
                seen |= new
                if os.fork() == 0:  # it goes on while the next one looks for what listens by then
                    with suppress(BaseException):
                        _become_nobody()
                        attack(ports, names)
                    os._exit(0)
            time.sleep(0.004)
    try:
        yield
    finally:
        os.killpg(pid, 9)
        os.waitpid(pid, 0)


def _become_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def listening(root: int, but: int | None = None) -> tuple[set[int], set[str]]:
    """Ports and names at which a process or those that it started listen; those of others are no business of ours."""
    found, todo, inodes = set[int](), [root], set[str]()
    while todo:
        found.add(parent := todo.pop())
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{parent}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{parent}/fd/{fd}"))
            todo += [pid for pid in child_processes.children(parent) if pid != but]
    tables = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    ports = {int(f[1].rpartition(":")[2], 16) for f in tables if f[3] == "0A" and f"socket:[{f[9]}]" in inodes}
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {f[7] for f in local if len(f) > 7 and int(f[3], 16) & 0x10000 and f"socket:[{f[6]}]" in inodes}
    return ports, names


def payloads(trace: Path) -> list[bytes]:
    """What might be unpickled, framed as torch's collectives and stores, multiprocessing and gloo frame things."""
    bomb = pickle.dumps(Bomb(trace))
    framed = [struct.pack("!i", len(bomb)) + bomb, struct.pack("=q", len(bomb)) + bomb, bomb]
    places = [struct.pack("=q", number) + struct.pack("=q", len(bomb)) + bomb for number in range(4)]
    key = b"default_pg/0//1"
    put = b"\x00" + struct.pack("=Q", len(key)) + key + struct.pack("=Q", len(bomb)) + bomb
    return [*framed, *places, struct.pack("=BI", 1, 0x3C85F7CE) + put, b"\xff" * 256, b""]


def knock(trace: Path, ports: set[int], names: set[str]) -> None:
    """Connect to all that listens, and send everything there is."""
    for port in ports:
        for data in payloads(trace):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2) as line:
                line.sendall(data)
    for name in names:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            for data in payloads(trace):
                with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as line:
                    line.settimeout(0.2)
                    line.connect(("\0" + name[1:]) if name.startswith("@") else name)
                    line.sendall(data)


def join_as_rank_1(trace: Path, ports: set[int], names: set[str]) -> None:
    """Come before rank 1 to the store that the workers meet at, if it is at a port, and gather a pickle with rank 0."""
    for port in ports:
        if os.fork() == 0:
            with suppress(BaseException):
                patience = timedelta(seconds=2)
                store: Any = dist.TCPStore("127.0.0.1", port, 2, False, patience, False)  # type: ignore[attr-defined]
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                met = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
                dist.init_process_group("gloo", store=met, rank=1, world_size=2, timeout=patience)
                dist.all_gather_object([None, None], Bomb(trace))
            os._exit(0)


def together(context: WorkerContext) -> float:
    transport = choose_transport(context.world)(context.world, [], [range(context.world.size)])
    told = transport.all_gather_object({"rank": context.rank})
    assert told == [{"rank": rank} for rank in range(context.world.size)]
    value = torch.full((4,), float(context.rank + 1))
    for _ in range(20):
        summed = transport.all_reduce(value.clone(), range(context.world.size)).wait()
        time.sleep(0.002)
    transport.close()
    return float(summed.sum())


@pytest.mark.parametrize("attack", subsets.one_in(2, [knock, join_as_rank_1]))
def test_the_stranger_is_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Callable[[Path, set[int], set[str]], None]
):
    """Several jobs, of which every one has to be right, and none may run what he sends."""
    run_process = StartedWorker.run_process

    def run_late(started: StartedWorker, worker: Any) -> None:
        time.sleep(0.2 * started.rank)  # rank 1 comes late: others could take its place meanwhile
        run_process(started, worker)

    monkeypatch.setattr(StartedWorker, "run_process", run_late)
    trace = tmp_path / "ran"
    right = 0
    with stranger(partial(attack, trace)):
        for _ in range(TRIES):
            right += fork_workers(together, 2) == [12.0, 12.0]
    assert right == TRIES
    assert not trace.exists()


def test_a_forked_job_listens_at_no_port_and_nobody_else_may_reach_its_sockets():
    def worker(context: WorkerContext) -> tuple[set[int], list[int]]:
        transport = choose_transport(context.world)(context.world, [], [range(context.world.size)])
        transport.barrier()
        ports = listening(os.getpid())[0]
        transport.barrier()
        transport.close()
        return ports, [stat.S_IMODE(os.stat(f"/proc/self/fd/{fd}").st_mode) for fd in memory_files()]

    for ports, modes in fork_workers(worker, 3):
        assert not ports
        assert modes
        assert all(not mode & 0o077 for mode in modes)


def memory_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if _open(fd) and "memfd:" in os.readlink(f"/proc/self/fd/{fd}")]


def _open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_place_is_its_owners_alone():
    for place in (MeetingPlace.in_memory(), MeetingPlace.in_folder()):
        try:
            folder = Path(place.file).parent
            if place.file.startswith("/proc"):
                assert stat.S_IMODE(os.stat(place.file).st_mode) == 0o600
            else:
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        finally:
            place.remove_files()
        assert not os.path.exists(place.file)


def test_who_takes_a_place_over_gloo_without_the_secret_is_refused():
    """Where gloo is asked for it takes whoever connects; so each worker proves itself in every new group."""

    def worker(context: WorkerContext) -> str:
        context.world.connect()
        if context.rank == 1:
            assert context.world.board is not None
            context.world.board.secret = b"another"
        with pytest.raises(PolylaneError) as caught:
            context.world.authenticate_group(dist.group.WORLD)
        return str(caught.value)

    for rank, said in enumerate(fork_workers(worker, 2)):
        assert f"who connected as rank {1 - rank} is not a worker of this job" in said


def test_a_group_over_gloo_introduces_itself():
    def worker(context: WorkerContext) -> list[Any]:
        transport = c10d.C10dTransport(context.world, [], [(0, 1)], own_groups=True)
        told = transport.all_gather_object(context.rank)
        transport.close()
        return told

    assert fork_workers(worker, 3) == [[0, 1, 2]] * 3


def test_a_proof_of_before_is_no_proof():
    """Who was in a rank's place once, and heard the others' proofs, cannot repeat them in a group of the same name."""

    def worker(context: WorkerContext) -> str:
        context.world.connect()
        said = dict[int, list[bytes]]()
        exchange = plain_objects._exchange

        def record(group: Any, ranks: Any, each: Any) -> dict[int, bytes]:
            heard = exchange(group, ranks, each)
            said.setdefault(len(said), []).append(each[1 - context.rank])
            return heard

        def repeat(group: Any, ranks: Any, each: Any) -> dict[int, bytes]:
            before = said[turn.pop(0)][0]
            return exchange(group, ranks, dict.fromkeys(ranks, before) if context.rank == 1 else each)

        plain_objects._exchange = record
        context.world.authenticate_group(dist.group.WORLD)
        plain_objects._exchange, turn = repeat, [0, 1]
        if context.rank == 0:
            with pytest.raises(PolylaneError, match="who connected as rank 1 is not a worker of this job"):
                context.world.authenticate_group(dist.group.WORLD)
        else:
            with suppress(PolylaneError):
                context.world.authenticate_group(dist.group.WORLD)
        return "held"

    assert fork_workers(worker, 2) == ["held"] * 2


def test_a_shared_secret_over_hosts(monkeypatch: pytest.MonkeyPatch):
    """Workers that an agent started know POLYLANE_SECRET, and who does not is refused when it connects."""

    def worker(context: WorkerContext, secrets: tuple[str, str]) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = context.world.all_gather_object(listener.getsockname()[1])[0]
        context.world.leave()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), POLYLANE_SECRET=secrets[context.rank])
        os.environ.update(RANK=str(context.rank), WORLD_SIZE="2")
        from polylane.runtime.workers.world import World

        world = World.join()
        value = torch.tensor(1.0)
        dist.all_reduce(value)
        world.leave()
        return value.item()

    assert fork_workers(lambda context: worker(context, ("same", "same")), 2) == [2.0, 2.0]
    with pytest.raises((PolylaneError, WorkerFailed), match="not a worker of this job"):
        fork_workers(lambda context: worker(context, ("same", "other")), 2)
