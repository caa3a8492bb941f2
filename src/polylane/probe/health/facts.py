"""Facts of one worker: its software, devices, memory, limits, disks, and the address at which others would reach it."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import statistics
import struct
import time
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from polylane.probe.machine import available_memory, cores
from polylane.runtime.workers.launch_environment import Launch
from polylane.runtime.workers.world import pick_device

SHARED_MEMORY = Path("/dev/shm")
_SIDE, _RUNS = 768, 9  # of the matrices that each worker multiplies, and how often
_GET_ADDRESS, _ASK_DRIVER, _GET_SETTINGS = 0x8915, 0x8946, 1  # SIOCGIFADDR, SIOCETHTOOL, ETHTOOL_GSET
_UNKNOWN_SPEED = 0xFFFF_FFFF


@dataclass(frozen=True)
class AcceleratorFacts:
    """A worker's accelerator: the name and the identity that its driver says, and bytes of memory."""

    name: str
    identity: str
    free: int
    total: int


@dataclass(frozen=True)
class WorkerHealth:
    """What a worker says of itself and its host.

    Attributes:
        rank, local_rank: of this worker, on all hosts and on its own.
        host: what the host calls itself.
        machine: what tells hosts of one name apart.
        versions: of Python, torch and what torch was built for, by name.
        accelerator: None where it computes on the CPU.
        hidden: what the host has that torch does not use, in words; "" for nothing.
        cores: that this process may use.
        memory: bytes of the host's memory that are free.
        shared_memory: bytes free in /dev/shm; None where there is none.
        open_files: that this process may have at once.
        disk: bytes free where the run's folder is, or would be; None: no folder was named.
        folder_problem: why nothing can be written into that folder; "" where it can.
        interface: of the network, that others reach it over; "" where it is none of this host's.
        address: at which others reach it.
        interface_speed: bits per second that the interface says it has; None where it says nothing.
        name_problem: why the host's own name leads nowhere; "" where it does.
        matmul_seconds: of a fixed product of matrices on its device; 0 until it is measured, by :func:`time_matmul`.
    """

    rank: int = 0
    local_rank: int = 0
    host: str = ""
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    accelerator: AcceleratorFacts | None = None
    hidden: str = ""
    cores: int = 1
    memory: int = 0
    shared_memory: int | None = None
    open_files: int = 0
    disk: int | None = None
    folder_problem: str = ""
    interface: str = ""
    address: str = ""
    interface_speed: float | None = None
    name_problem: str = ""
    matmul_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> WorkerHealth:
        """Return the facts that :meth:`to_dict` wrote."""
        card = data["accelerator"]
        return WorkerHealth(**{**data, "accelerator": None if card is None else AcceleratorFacts(**card)})


def collect_facts(launch: Launch, folder: Path | None) -> WorkerHealth:
    """Collect the facts of this worker; takes about a second.

    Args:
        launch: which worker this is.
        folder: the folder of the run; None: no disk is looked at.
    """
    device = pick_device(launch.local_rank)
    address, name_problem = choose_address(launch)
    interface = find_interface(address)
    disk, folder_problem = (None, "") if folder is None else _look_at_folder(folder)
    return WorkerHealth(
        rank=launch.rank,
        local_rank=launch.local_rank,
        host=socket.gethostname(),
        machine=_machine_identity(),
        versions=_versions(),
        accelerator=_accelerator(device),
        hidden=_hidden_devices(device),
        cores=cores(),
        memory=available_memory(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk=disk,
        folder_problem=folder_problem,
        interface=interface,
        address=address,
        interface_speed=_interface_speed(interface),
        name_problem=name_problem,
    )


def choose_address(launch: Launch) -> tuple[str, str]:
    """Return the address at which gloo would listen, and why the host's name leads nowhere ("" where it does).

    That of the interface in GLOO_SOCKET_IFNAME; else the one that the host's own name stands for. Where all workers are
    on one host, the loopback interface.
    """
    if launch.size == launch.local_size:
        return "127.0.0.1", ""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    try:
        own_address = socket.gethostbyname(socket.gethostname())
        problem = ""
    except OSError as error:
        own_address, problem = "", f"{socket.gethostname()}: {error.strerror or error}"
    if named:
        return _interface_address(named), ""
    return own_address, problem


def find_interface(address: str) -> str:
    """Return the name of this host's interface that has an address; "" for none."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address and _interface_address(name) == address), "")


def _interface_address(name: str) -> str:
    """Return the IPv4 address of an interface; "" where it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _interface_speed(name: str) -> float | None:
    """Return the bits per second that an interface says it has; None where it does not say."""
    # struct ethtool_cmd of linux/ethtool.h: the speed in Mb/s is in two halves, at bytes 12 and 28.
    answer = array("B", struct.pack("I40x", _GET_SETTINGS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, _ASK_DRIVER, struct.pack("16sP8x", name[:15].encode(), answer.buffer_info()[0]))
        except OSError:  # the loopback, or a driver that does not say
            return None
    megabits = struct.unpack_from("H", answer, 12)[0] + (struct.unpack_from("H", answer, 28)[0] << 16)
    return megabits * 1e6 if 0 < megabits < _UNKNOWN_SPEED else None


def _machine_identity() -> str:
    from polylane.runtime.transport.shared_memory.rendezvous import host_identity

    return str(host_identity())


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
        if torch.cuda.is_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _accelerator(device: torch.device) -> AcceleratorFacts | None:
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return AcceleratorFacts(card.name, str(getattr(card, "uuid", device.index)), free, total)


def _hidden_devices(device: torch.device) -> str:
    """Return what accelerators the host has that torch does not see, in words; "" for none."""
    if device.type == "cpu" and Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        built = "was built without CUDA" if not torch.version.cuda else f"was built for CUDA {torch.version.cuda}"
        return f"an NVIDIA driver is there, but torch {torch.__version__} {built} and sees no GPU"
    return ""


def _look_at_folder(folder: Path) -> tuple[int | None, str]:
    """Return the bytes free on a folder's disk, and why nothing can be written there; "" where it can."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    problem = "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written"
    return shutil.disk_usage(existing).free, problem


def time_matmul(launch: Launch) -> float:
    """Return the lower quartile of the seconds of a product of two matrices, on one thread or on the accelerator."""
    from polylane.profiling.time_operators import wait_for

    device = pick_device(launch.local_rank)
    threads, wait = torch.get_num_threads(), wait_for(device)
    torch.set_num_threads(1)
    try:
        matrix, times = torch.ones(_SIDE, _SIDE, device=device), list[float]()
        for _ in range(_RUNS + 1):
            wait()
            start = time.perf_counter()
            matrix @ matrix
            wait()
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.quantiles(times[1:], n=4)[0]
