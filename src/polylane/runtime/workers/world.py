"""World: rank, size and device of this worker, and the process groups of all workers."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polylane.errors import PolylaneError
from polylane.runtime.transport import plain_objects as objects
from polylane.runtime.workers.file_store import FileStore

# A dead peer closes its connections, which is noticed at once. This bounds the wait for a live peer that never answers:
# long enough for a first step that compiles, or a checkpoint that only one rank writes.
TIMEOUT = timedelta(minutes=10)

# Environment variable with a secret that workers on several hosts share: a process without it is refused on connecting.
SECRET = "POLYLANE_SECRET"

_started: World | None = None  # this process's world, if another process of this host started it as a worker


@dataclass(frozen=True, slots=True)
class World:
    """This worker among all workers.

    Attributes:
        rank: rank of this worker among all workers, from 0.
        size: number of workers on all hosts.
        local_rank: rank of this worker among those of its host, from 0.
        device: device on which this worker computes.
        backend: c10d backend, ``"gloo"`` or ``"nccl"``; None for a single worker without any process group.
        is_joined: whether this world makes and ends the default process group, see :meth:`leave`.
        group: process group of these workers, if they are the first of a larger world; None: the default group.
        board: store of workers that one process of this host started; None for other workers.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str | None
    is_joined: bool = False
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    board: FileStore | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_started_worker(cls, board: FileStore, rank: int, size: int) -> World:
        """Build the world of a worker that a process of this host started, with all other workers.

        No process group is made before it is needed (:meth:`connect`), because its backend listens on a port.

        Args:
            board: store over which the workers meet.
            rank: rank of this worker, from 0.
            size: number of workers, all on this host.

        Raises:
            PolylaneError: this host has fewer accelerators than workers.
        """
        global _started
        device = pick_device(rank, size)
        _started = cls(rank, size, rank, device, backend_of_device(device), is_joined=True, board=board)
        return _started

    @classmethod
    def join(cls, timeout: timedelta = TIMEOUT) -> World:
        """Join the other workers by torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

        Without RANK in the environment this worker is alone, and no process group is made. A process group that is
        already initialised is used unchanged. Makes the chosen device the current one.

        Raises:
            PolylaneError: the environment is incomplete, or this host has fewer accelerators than workers.
        """
        if _started is not None:
            return replace(_started, is_joined=False)
        if dist.is_initialized():
            return cls._of_existing_group()
        if "RANK" not in os.environ:
            return cls(rank=0, size=1, local_rank=0, device=pick_device(0, 1), backend=None)
        rank, size = _read_environment("RANK"), _read_environment("WORLD_SIZE")
        local_rank = _read_environment("LOCAL_RANK", default=rank)
        device = pick_device(local_rank, _read_environment("LOCAL_WORLD_SIZE", default=1))
        backend = backend_of_device(device)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise PolylaneError(f"RANK is set but {name} is not: start the workers with torchrun, or unset RANK")
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
        world = cls(rank, size, local_rank, device, backend, is_joined=True)
        atexit.register(world.leave)  # gloo's threads must not outlive the interpreter
        world.authenticate_group(dist.group.WORLD)
        return world

    def connect(self) -> World:
        """Make the default process group if there is none, and return this world; a collective of all workers."""
        if self.board is not None and not dist.is_initialized():
            self.board.all_gather_object(None)  # a worker that has ended raises PeerLost here, not in the backend
            # All workers are on this host: gloo must not listen on an interface that other hosts can reach.
            if self.backend == "gloo":
                os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
            dist.init_process_group(
                self.backend, store=self.board.store, rank=self.rank, world_size=self.size, timeout=TIMEOUT
            )
            atexit.register(_destroy_group)
            self.authenticate_group(dist.group.WORLD)
        return self

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every worker's plain value (``transport.serialization``), by rank; a collective of all workers."""
        if self.size == 1:
            return [value]
        if self.board is not None:
            return self.board.all_gather_object(value)
        return objects.all_gather(value, self.group)

    def authenticate_group(self, group: dist.ProcessGroup | None) -> None:
        """Authenticate the members of a new process group to one another; a collective of the group.

        Skipped for backends other than gloo, and for workers without a shared secret.

        Raises:
            PolylaneError: a process that does not know the secret has taken a worker's place.
        """
        secret = self.board.secret if self.board is not None else os.environ.get(SECRET, "").encode()
        if group is not None and secret and dist.get_backend(group) == "gloo" and dist.get_world_size(group) > 1:
            objects.authenticate_group(group, secret, dist.get_process_group_ranks(group), dist.get_rank())

    @classmethod
    def _of_existing_group(cls) -> World:
        """Build the world of a process group that the user's script made, on a device that the group supports."""
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = _read_environment("LOCAL_RANK", default=rank)
        accelerator = accelerator_type()
        if accelerator is not None and _group_backend(accelerator) == backend_of_device(torch.device(accelerator)):
            device = pick_device(local_rank, _read_environment("LOCAL_WORLD_SIZE", default=1))
        else:
            device = torch.device("cpu")
        return cls(rank, size, local_rank, device, _group_backend(device.type))

    def first_workers(self, size: int) -> World:
        """Return the world of the first ``size`` workers, with a process group of their own.

        A collective of all workers; the other ones cannot use the result.
        """
        if size == self.size:
            return self
        self.connect()
        group = dist.new_group(list(range(size)), timeout=TIMEOUT)
        if self.rank >= size:
            return replace(self, size=size, group=None)
        self.authenticate_group(group)
        return replace(self, size=size, group=group, board=None)

    def leave(self) -> None:
        """Destroy the process groups that :meth:`join` and :meth:`first_workers` made; idempotent."""
        if self.group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # already destroyed
                dist.destroy_process_group(self.group)
        if self.is_joined:
            global _started
            if _started is not None and self.board is not None:
                self.board.mark_left()
            _started = None
            _destroy_group()


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_of_device(device: torch.device) -> str:
    """Return the c10d backend for tensors of a device: ``"nccl"`` for cuda, ``"gloo"`` for cpu."""
    return str(dist.get_default_backend_for_device(device))


def affine_cores() -> int:
    """Return the number of cores that this process may use, by its CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerator_type() -> str | None:
    """Return the type of this host's accelerator with collectives of its own (``"cuda"``, ...), or None.

    This may initialise the accelerator's driver: afterwards the process must not be forked for workers on accelerators.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or backend_of_device(accelerator) == "gloo":  # MPS: gloo cannot carry its tensors
        return None
    return str(accelerator.type)


def pick_device(local_rank: int, local_size: int) -> torch.device:
    """Choose a worker's device and make it the current one: an accelerator of its own, or else the CPU.

    Args:
        local_rank: rank of the worker among those of its host, from 0.
        local_size: number of workers on the host.

    Raises:
        PolylaneError: the host has accelerators, but fewer than workers.
    """
    accelerator = accelerator_type()
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_size > count:
        raise PolylaneError(
            f"{local_size} workers on a host with {count} {accelerator} device(s), and each needs one of its own: "
            "use fewer workers, or hide the devices (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    device = torch.device(accelerator, local_rank % count)
    torch.accelerator.set_device_index(device)
    return device


def _group_backend(device_type: str) -> str:
    """Return the default group's backend for a type of device; its configuration reads "cpu:gloo,cuda:nccl"."""
    parts = (part.partition(":") for part in dist.get_backend_config().split(","))
    backends = {device: backend for device, _, backend in parts}
    return backends.get(device_type, str(dist.get_backend()))


def _read_environment(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        said = "is not set" if text is None else f"is {text!r}, not a whole number"
        raise PolylaneError(f"RANK is set but {name} {said}: start the workers with torchrun, or unset RANK") from None
