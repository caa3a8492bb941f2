"""Two hosts: namespaces of this machine that are hosts to what runs in them, with a link between them that can drop.

    host-a  data0 ──────── 10.77.0.0/24 ──────── data0  host-b        what the workers send each other; it drops
       └─ store0 ── 10.77.1.0/24 ── middle ── 10.77.2.0/24 ── store0 ─┘    torchrun's stores are reached so; it stays

Each has a network and a name of its own, so that workers of both share no memory. None of it is seen outside, nor is
anything left: namespaces without a process and an open descriptor are gone, and their links with them.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

NAMES = ("host-a", "host-b")
DATA_LINK, STORE_LINK = "data0", "store0"
STORE_ADDRESS = "10.77.3.1"
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

    def ip(self, line: str) -> None:
        """Run ``ip LINE`` on this host.

        Raises:
            OSError: it failed.
        """
        with self.enter():
            process = subprocess.run(["ip", *line.split()], capture_output=True, text=True)
        if process.returncode:
            raise OSError(f"ip {line}: {process.stderr.strip()}")


@dataclass(frozen=True)
class TwoHosts:
    """The two hosts, and the one between them at whose store torchrun's agents meet.

    Attributes:
        hosts: the two, in the order of their ranks.
        middle: what both reach also while the link between them is down.
    """

    hosts: tuple[Namespaces, Namespaces]
    middle: Namespaces

    @classmethod
    def make(cls) -> TwoHosts | str:
        """Make the hosts and their links; return why that is not possible here, if it is not."""
        if sys.platform != "linux":
            return "this is not Linux"
        if os.geteuid() != 0:
            return "only root may make them"
        if shutil.which("ip") is None:
            return "there is no command ip (of iproute2)"
        try:
            first, second, middle = (Namespaces.make(name) for name in (*NAMES, "middle"))
            hosts = cls((first, second), middle)
            hosts._connect()
        except OSError as error:
            return str(error)
        return hosts

    def _connect(self) -> None:
        first, second = self.hosts
        self._add_link(first, DATA_LINK, "10.77.0.1/24", second, DATA_LINK, "10.77.0.2/24")
        self.middle.ip("link set lo up")
        self.middle.ip(f"addr add {STORE_ADDRESS}/32 dev lo")
        with self.middle.enter():  # the first host's agent has a store of its own, for the workers
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for number, host in enumerate(self.hosts, 1):
            near, far = f"10.77.{number}.1", self.address_of(number)
            self._add_link(self.middle, f"host{number}", f"{near}/24", host, STORE_LINK, f"{far}/24")
            host.ip("link set lo up")
            for beyond in (STORE_ADDRESS, self.address_of(3 - number)):
                host.ip(f"route add {beyond}/32 via {near}")

    def _add_link(
        self, source: Namespaces, name: str, address: str, peer: Namespaces, other_name: str, other_address: str
    ) -> None:
        peer_network = f"/proc/{os.getpid()}/fd/{peer.network}"
        source.ip(f"link add {name} type veth peer name {other_name} netns {peer_network}")
        for host, end, end_address in ((source, name, address), (peer, other_name, other_address)):
            host.ip(f"link set {end} addrgenmode none")  # IPv4 alone: gloo takes one address of an interface
            host.ip(f"addr add {end_address} dev {end}")
            host.ip(f"link set {end} up")

    @staticmethod
    def address_of(number: int) -> str:
        """Return the address of a host, 1 or 2, that the store's host reaches it at."""
        return f"10.77.{number}.2"

    def close(self) -> None:
        """Give the hosts up; they are gone with the last process on them."""
        for host in (*self.hosts, self.middle):
            host.close()

    def raise_link(self) -> list[str]:
        """Have the link carry again; return the state of its two ends, as :func:`read_link` reads it."""
        for host in self.hosts:
            host.ip(f"link set {DATA_LINK} up")
        states = []
        for host in self.hosts:
            with host.enter():
                states.append(read_link())
        return states

    def open_store(self) -> TCPStore:
        """Open a store that both hosts reach at :data:`STORE_ADDRESS`, for one run of torchrun's agents."""
        from torch._C._distributed_c10d import TCPStore

        with self.middle.enter():
            return TCPStore(STORE_ADDRESS, 0, None, True, wait_for_workers=False)


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
