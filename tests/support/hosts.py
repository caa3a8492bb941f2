"""Hosts: namespaces of this machine that are hosts to what runs in them, with links between them that drop or are slow.

    host-a  data0 ──┐
    host-b  data0 ──┼── switch (10.77.0.0/24)       what the workers send each other, at a rate; a link drops
    ...             ┘
    host-a  store0 ── 10.77.1.0/24 ── middle         torchrun's stores are reached so; it stays, and is not slowed
    host-b  store0 ── 10.77.2.0/24 ── middle

Each has a network and a name of its own, so that workers of two share no memory. None of it is seen outside, nor is
anything left: namespaces without a process and an open descriptor are gone, and their links with them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

DATA_LINK, STORE_LINK, SWITCH = "data0", "store0", "switch"
STORE_ADDRESS = "10.77.250.1"
MOST_HOSTS = 8
# Seconds for which a slow link lets through what comes, and what waits before it. The queue is long: what a full one
# drops, TCP sends again only after a fifth of a second or more.
_BURST_SECONDS, _QUEUE = 500e-6, "256mb"
_UNITS = {"mbit": 1e6, "gbit": 1e9}
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000


@dataclass(frozen=True)
class Namespaces:
    """What makes a host: descriptors of a network and of a name.

    Attributes:
        network: descriptor of the network namespace.
        name: descriptor of the namespace with the host's name.
    """

    network: int
    name: int

    @classmethod
    def of_this_thread(cls) -> Namespaces:
        """Open those of the calling thread."""
        return cls(*(os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts")))

    @classmethod
    def make(cls, name: str) -> Namespaces:
        """Make a new host of this name.

        Raises:
            OSError: the system or the user's rights do not allow it.
        """

        def unshare() -> Namespaces:
            library = ctypes.CDLL(None, use_errno=True)
            if library.unshare(_CLONE_NEWNET | _CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            socket.sethostname(name)
            return cls.of_this_thread()

        return _run_in_thread(unshare)  # the thread alone is in the new namespaces, and ends

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Have the calling thread, and the processes that it starts, be on this host meanwhile."""
        old_namespaces = Namespaces.of_this_thread()
        try:
            self._take()
            yield
        finally:
            old_namespaces._take()
            old_namespaces.close()

    def _take(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        for descriptor in (self.network, self.name):
            if library.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.network)
        os.close(self.name)

    def run(self, line: str) -> None:
        """Run a command on this host, such as ``ip link set lo up``.

        Raises:
            OSError: it failed.
        """
        with self.enter():
            process = subprocess.run(line.split(), capture_output=True, text=True)
        if process.returncode:
            raise OSError(f"{line}: {process.stderr.strip()}")


@dataclass(frozen=True)
class HostOutput:
    """How a command ended on a host: its exit code, and what it printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Hosts:
    """Hosts with a link of each to a switch, and the one between them at whose store torchrun's agents meet.

    Attributes:
        hosts: in the order of their ranks.
        middle: has the switch, and what all reach also while a link is down.
    """

    hosts: tuple[Namespaces, ...]
    middle: Namespaces

    @classmethod
    def make(cls, count: int = 2, rate: str | None = None) -> Hosts | str:
        """Make hosts and their links; return why that is not possible here, if it is not.

        Args:
            count: how many.
            rate: of every link, in each direction, as ``tc`` takes it, such as "1gbit"; None: what the machine can.
        """
        if reason := cls.why_not():
            return reason
        try:
            *made, middle = (Namespaces.make(name) for name in (*host_names(count), "middle"))
            hosts = cls(tuple(made), middle)
            hosts._connect(rate)
        except OSError as error:
            return str(error)
        return hosts

    @staticmethod
    def why_not() -> str:
        """Return why hosts cannot be made here, as far as it is seen without trying; "" if nothing is in the way."""
        if sys.platform != "linux":
            return "this is not Linux"
        if os.geteuid() != 0:
            return "only root may make them"
        missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
        return f"there is no command {missing[0]} (of iproute2)" if missing else ""

    def _connect(self, rate: str | None) -> None:
        self.middle.run("ip link set lo up")
        self.middle.run(f"ip addr add {STORE_ADDRESS}/32 dev lo")
        self.middle.run(f"ip link add {SWITCH} type bridge")
        self.middle.run(f"ip link set {SWITCH} up")
        with self.middle.enter():  # the first host's agent has a store of its own, for the workers
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        numbers = range(1, len(self.hosts) + 1)
        for number, host in zip(numbers, self.hosts, strict=True):
            port, near = f"port{number}", f"10.77.{number}.1"
            self._add_link(port, None, host, DATA_LINK, f"{data_address(number)}/24")
            self.middle.run(f"ip link set {port} master {SWITCH}")
            self._add_link(f"host{number}", f"{near}/24", host, STORE_LINK, f"{store_address(number)}/24")
            host.run("ip link set lo up")
            for target in (STORE_ADDRESS, *(store_address(other) for other in numbers if other != number)):
                host.run(f"ip route add {target}/32 via {near}")
            if rate:
                self.slow_down(number - 1, rate)

    def _add_link(self, name: str, address: str | None, host: Namespaces, host_end: str, host_address: str) -> None:
        """Lay a link from the middle to a host."""
        host_network = f"/proc/{os.getpid()}/fd/{host.network}"
        self.middle.run(f"ip link add {name} type veth peer name {host_end} netns {host_network}")
        for place, end, end_address in ((self.middle, name, address), (host, host_end, host_address)):
            place.run(f"ip link set {end} addrgenmode none")  # IPv4 alone: gloo takes one address of an interface
            if end_address is not None:
                place.run(f"ip addr add {end_address} dev {end}")
            place.run(f"ip link set {end} up")

    def slow_down(self, number: int, rate: str) -> None:
        """Let the link of a host, from 0, carry so much in each direction, as ``tc`` takes it, such as "1gbit"."""
        for end, device in ((self.hosts[number], DATA_LINK), (self.middle, f"port{number + 1}")):
            end.run(f"tc qdisc replace dev {device} root tbf rate {rate} burst {_burst(rate)} limit {_QUEUE}")

    def close(self) -> None:
        """Give the hosts up; they are gone with the last process on them."""
        for host in (*self.hosts, self.middle):
            host.close()

    def drop_host(self, number: int) -> None:
        """Have a host reach nobody: both of its links carry nothing."""
        for device in (DATA_LINK, STORE_LINK):
            self.hosts[number].run(f"ip link set {device} down")

    def raise_link(self) -> list[str]:
        """Have all links carry again; return the state of every host's end, as :func:`read_link` reads it."""
        for host in self.hosts:
            host.run(f"ip link set {DATA_LINK} up")
        states = []
        for host in self.hosts:
            with host.enter():
                states.append(read_link())
        return states

    def open_store(self) -> TCPStore:
        """Open a store that all hosts reach at :data:`STORE_ADDRESS`, for one run of torchrun's agents."""
        from torch._C._distributed_c10d import TCPStore

        with self.middle.enter():
            return TCPStore(STORE_ADDRESS, 0, None, True, wait_for_workers=False)

    def agent_options(self, store: TCPStore, run: str) -> list[list[str]]:
        """Return the options of torchrun's agent on every host but the number of its workers, for one run."""
        meeting = ["--nnodes", str(len(self.hosts)), "--rdzv-backend", "c10d", "--rdzv-id", run]
        meeting += ["--rdzv-endpoint", f"{STORE_ADDRESS}:{store.port}", "--rdzv-conf", "is_host=0"]
        return [[*meeting, "--local-addr", store_address(number)] for number in range(1, len(self.hosts) + 1)]

    def run_torchrun(
        self,
        words: Sequence[str],
        workers: int,
        seconds: float = 120.0,
        folders: Sequence[Path] = (),
        own_mounts: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> list[HostOutput]:
        """Run a command in so many workers on each host, which torchrun starts; wait for its end.

        Args:
            words: what torchrun gets behind its options, such as ["-m", "--", "polylane", "train", ...].
            workers: number of workers on every host.
            seconds: after which all is killed.
            folders: the folder that it runs in, on each host; default: this process's.
            own_mounts: folders of which every host has an empty one of its own, such as /dev/shm; "FOLDER:SIZE" for one
                of so many bytes, as mount takes them.
            environment: further variables.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        with HostRun(self, words, workers, folders, own_mounts, environment) as run:
            for number in range(len(self.hosts)):
                run.start(number)
            return run.wait(seconds)


class HostRun:
    """A command in workers on each host, which torchrun's agents start; as a context manager it ends all of them.

    Args:
        hosts: where.
        words, workers, folders, own_mounts, environment: the same arguments as of :meth:`Hosts.run_torchrun`.
        options: further options of torchrun's, which count where all runs have others.
    """

    def __init__(
        self,
        hosts: Hosts,
        words: Sequence[str],
        workers: int,
        folders: Sequence[Path] = (),
        own_mounts: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        options: Sequence[str] = (),
    ) -> None:
        self._hosts, self._words, self._folders, self._mounts = hosts, words, folders, own_mounts
        self._options = [*options, "--nproc-per-node", str(workers)]
        self._store = hosts.open_store()  # a store without a reference ends
        self._variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DATA_LINK, **environment}
        # Else torch warns that no name service knows the hosts.
        self._variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._agents = dict[int, subprocess.Popen[bytes]]()

    def __enter__(self) -> HostRun:
        self._at = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)  # its workers end with it
                agent.wait()
        self._at.cleanup()

    def start(self, number: int) -> None:
        """Start the agent of a host, or another one after that has ended; what they print is joined."""
        meeting = self._hosts.agent_options(self._store, f"run{self._store.port}")[number]
        launch = [sys.executable, "-m", "torch.distributed.run", *meeting, *self._options]
        out, error = (open(self._file(number, name), "ab") for name in ("stdout", "stderr"))  # noqa: SIM115
        with self._hosts.hosts[number].enter(), out, error:
            self._agents[number] = subprocess.Popen(
                [*_mount_own(self._mounts), *launch, *self._words],
                stdout=out,
                stderr=error,
                cwd=self._folders[number] if self._folders else None,
                env=self._variables,
                start_new_session=True,
            )

    def _file(self, number: int, name: str) -> Path:
        return Path(self._at.name) / f"{name}{number}"

    def read(self, number: int, name: str = "stderr") -> str:
        """Return what a host has printed so far."""
        return self._file(number, name).read_text(errors="replace")

    def wait(self, seconds: float, only: Sequence[int] = ()) -> list[HostOutput]:
        """Wait for the end of the agents of all hosts, or of some, and return how they ended.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        deadline = time.monotonic() + seconds
        numbers = only or sorted(self._agents)
        codes = [self._agents[number].wait(deadline - time.monotonic()) for number in numbers]
        files = [(self.read(number, "stdout"), self.read(number)) for number in numbers]
        return [HostOutput(code, *texts) for code, texts in zip(codes, files, strict=True)]

    def list_workers(self, number: int) -> list[int]:
        """Return the process ids of a host's workers."""
        tasks = Path(f"/proc/{self._agents[number].pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def kill_host(self, number: int) -> None:
        """Kill all processes of a host at once, as where it loses its power."""
        network = os.fstat(self._hosts.hosts[number].network).st_ino
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.stat(process / "ns" / "net").st_ino == network:
                    os.kill(int(process.name), signal.SIGKILL)
        self._agents[number].wait()


def host_names(count: int) -> tuple[str, ...]:
    """Return the names of so many hosts."""
    return tuple(f"host-{letter}" for letter in "abcdefgh"[:count])


def _burst(rate: str) -> int:
    """Return the bytes that a link lets through at once; a frame at least."""
    bits = float(rate[:-4]) * _UNITS[rate[-4:]]
    return max(16_000, int(bits / 8 * _BURST_SECONDS))


def data_address(number: int) -> str:
    """Return the address of a host, from 1, on the links that workers send over."""
    return f"10.77.0.{number}"


def store_address(number: int) -> str:
    """Return the address of a host, from 1, at which the middle reaches it."""
    return f"10.77.{number}.2"


def _mount_own(folders: Sequence[str]) -> list[str]:
    """Return the beginning of a command line that has empty folders of its own in place of some."""
    if not folders:
        return []
    pairs = [folder.partition(":")[::2] for folder in folders]
    script = " && ".join(f"mount -t tmpfs -o size={size or '50%'} own {folder}" for folder, size in pairs)
    return ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]


def drop_link() -> str:
    """Take this host's end of the link down; return its state, as :func:`read_link` reads it."""
    subprocess.run(["ip", "link", "set", DATA_LINK, "down"], check=True)
    return read_link()


def read_link() -> str:
    """Return what the system says of this host's end of the link: "UP" or "DOWN"."""
    process = subprocess.run(["ip", "-json", "link", "show", DATA_LINK], capture_output=True, text=True, check=True)
    return "UP" if "UP" in json.loads(process.stdout)[0]["flags"] else "DOWN"


def _run_in_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            results.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
