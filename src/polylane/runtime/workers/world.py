"""World: rank, size and device of this worker, and the process groups of all workers."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from polylane.errors import PolylaneError
from polylane.runtime.plain_data import plain_objects as objects
from polylane.runtime.progress_page import UNWATCHED, Progress
from polylane.runtime.workers.attempt import name_attempt
from polylane.runtime.workers.file_store import FileStore
from polylane.runtime.workers.launch_environment import Launch, read_number
from polylane.runtime.workers.stop_request import StopRequest

# A dead peer closes its connections, which is noticed at once. This bounds the wait for a live peer that never answers:
# long enough for a first step that compiles, or a checkpoint that only one rank writes.
TIMEOUT = timedelta(minutes=10)
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # name of the interface that other hosts cannot reach

# Environment variable with a secret that workers on several hosts share: a process without it is refused on connecting.
SECRET = "POLYLANE_SECRET"

_started: World | None = None  # this process's world, if another process of this host started it as a worker
_part_groups = 0  # process groups that this process has made with a part of all processes, the others unaware


@dataclass(frozen=True, slots=True)
class World:
    """This worker among all workers.

    Attributes:
        rank: rank of this worker among all workers, from 0.
        size: number of workers on all hosts.
        local_rank: rank of this worker among those of its host, from 0.
        device: device on which this worker computes.
        backend: c10d backend, ``"gloo"`` or ``"nccl"``; None for a single worker without any process group. Over gloo
            the tensors of an accelerator travel through the host, see ``on_host``.
        is_joined: whether this world makes and ends the default process group, see ``leave``.
        group: process group of these workers, if they are the first of a larger world; None: the default group.
        board: store of workers that one process of this host started; None for other workers.
        store: store of workers that torchrun started, with entries of this attempt only; None for other workers.
        stop: whether a signal asked the training to end, to be polled after every step.
        progress: where this worker says what it does.
        host_names: by rank, the name of its host; empty where all are on one, or nobody watches.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> batch = torch.ones(16, 8), torch.zeros(16, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> job.world.rank, job.world.size, job.world.stop.is_set()
        (0, 1, False)
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str | None
    is_joined: bool = False
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    board: FileStore | None = field(default=None, compare=False, repr=False)
    store: Store | None = field(default=None, compare=False, repr=False)
    stop: StopRequest = field(default_factory=StopRequest, compare=False, repr=False)
    progress: Progress = field(default=UNWATCHED, compare=False, repr=False)
    host_names: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of_started_worker(cls, board: FileStore, rank: int, size: int, stop: StopRequest | None = None) -> World:
        """Build the world of a worker that a process of this host started, with all other workers.

        No process group is made before it is needed (:meth:`connect`), because its backend listens on a port. The
        backend is gloo where workers share accelerators, since NCCL refuses two ranks on one device.

        Args:
            board: store over which the workers meet.
            rank: rank of this worker, from 0.
            size: number of workers, all on this host.
            stop: the request that these workers poll; None: one that nobody sets.
        """
        global _started
        device = pick_device(rank)
        shares = device.type != "cpu" and size > torch.accelerator.device_count()
        backend = "gloo" if shares else backend_of_device(device)
        _started = cls(rank, size, rank, device, backend, True, board=board, stop=stop or StopRequest())
        return _started

    @classmethod
    def join(cls, timeout: timedelta = TIMEOUT) -> World:
        """Join the other workers by torchrun's environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

        Without a launcher this worker is alone, and no process group is made. A process group that is
        already initialised is used unchanged. Makes the chosen device the current one. All workers take the same
        backend: NCCL if each has an accelerator of its own, else gloo.

        Raises:
            PolylaneError: the environment is incomplete.
        """
        if _started is not None:
            return replace(_started, is_joined=False)
        if dist.is_initialized():
            return cls._of_existing_group()
        launch = Launch.of_process()
        device = pick_device(launch.local_rank)
        if not launch.is_worker:
            return cls(rank=0, size=1, local_rank=0, device=device, backend=None)
        launch.check_meeting_place()
        backend = _own_backend(device, launch.local_size)
        store, rank, size = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        store.set_timeout(timeout)
        store = PrefixStore(name_attempt(PrefixStore("attempt", store), rank, size, timeout), store)
        backend = agree_on_backend(PrefixStore("backend", store), rank, size, backend, device)
        dist.init_process_group(
            backend,
            store=PrefixStore("default", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            pg_options=make_group_options(backend),
        )
        workers = PrefixStore("workers", store)
        world = cls(rank, size, launch.local_rank, device, backend, is_joined=True, store=workers)
        atexit.register(world.leave)  # gloo's threads must not outlive the interpreter
        world.authenticate_group(dist.group.WORLD)
        return world

    def connect(self) -> World:
        """Make the default process group if there is none, and return this world; a collective of all workers.

        Raises:
            PolylaneError: gloo has no interface to connect workers of this host over.
        """
        if self.board is not None and not dist.is_initialized():
            self.board.all_gather_object(None)  # a worker that has ended raises PeerLost here, not in the backend
            # All workers are on this host: nothing must listen on an interface that other hosts can reach. Gloo also
            # carries the objects of workers over NCCL, which itself listens where its members first meet.
            os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
            os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
            try:
                dist.init_process_group(
                    self.backend,
                    store=self.board.store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=TIMEOUT,
                    pg_options=make_group_options(self.backend),
                )
            except RuntimeError as error:
                if "Unable to find address" not in str(error):
                    raise
                raise PolylaneError(
                    f"the loopback interface {LOOPBACK}, over which gloo connects workers of one host, has no address: "
                    f"bring it up (ip link set {LOOPBACK} up)"
                ) from None
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
        local_rank = read_number("LOCAL_RANK", default=rank)
        accelerator = accelerator_type()
        if accelerator is not None and _group_backend(accelerator) == backend_of_device(torch.device(accelerator)):
            device = pick_device(local_rank)
        else:
            device = torch.device("cpu")
        return cls(rank, size, local_rank, device, _group_backend(device.type))

    @property
    def is_staged(self) -> bool:
        """Whether the tensors of this worker's device travel through the host, because its backend carries no other."""
        return self.backend == "gloo" and self.device.type != "cpu"

    @property
    def is_ordered(self) -> bool:
        """Whether a communication that was started may hold up what this worker starts later, as kernels of NCCL do."""
        return self.backend not in (None, "gloo")

    @property
    def accelerator(self) -> torch.device | None:
        """This worker's device, or None where it computes on the CPU."""
        return None if self.device.type == "cpu" else self.device

    def on_host(self) -> World:
        """Return this world for tensors on the CPU, as gloo and shared memory carry them."""
        return replace(self, device=torch.device("cpu"), is_joined=False)

    def first_workers(self, size: int) -> World:
        """Return the world of the first ``size`` workers, with a process group of their own.

        A collective of all workers; the other ones cannot use the result.
        """
        if size == self.size:
            return self
        self.connect()
        group = dist.new_group(list(range(size)), timeout=TIMEOUT, pg_options=make_group_options(self.backend))
        if self.rank >= size:
            return replace(self, size=size, group=None)
        self.authenticate_group(group)
        return replace(self, size=size, group=group, board=None)

    def new_part_group(self, ranks: Sequence[int], backend: str | None = None, **options: Any) -> dist.ProcessGroup:
        """Return a group of some workers, or of this one alone if it is none of them; a collective of this world.

        Processes outside of this world (dedicated servers) do not take part. Torch names a group by the number of
        groups so far: a worker that is not a member makes a group of itself alone, so that the numbers stay equal at
        all workers.

        Args:
            ranks: the members, among the workers of this world.
            backend: of c10d; None: that of the default group.
            options: other arguments of ``torch.distributed.new_group``.
        """
        global _part_groups
        members = list(ranks) if self.rank in ranks else [self.rank]
        group: dist.ProcessGroup = dist.new_group(members, TIMEOUT, backend, use_local_synchronization=True, **options)
        _part_groups += 1
        return group

    def agree_on_group_numbers(self) -> None:
        """Let all workers count as many process groups; a collective of all workers.

        From torch 2.14 on the groups of a part count where they were made, and the next one of all processes would have
        a name of its own there: all would wait for each other. Whoever has made fewer makes up for it.
        """
        count = max(self.all_gather_object(_part_groups))
        while _part_groups < count:
            dist.destroy_process_group(self.new_part_group([self.rank], "gloo"))

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


def is_ordered() -> bool:
    """Return whether this process is a started worker with an ordered backend."""
    return _started is not None and _started.is_ordered


def make_group_options(backend: str | None, most_blocks: int | None = None) -> Any:
    """Return the options of a process group by its backend; None for others than NCCL.

    Args:
        backend: c10d backend of the group.
        most_blocks: the most thread blocks of one of its kernels; None: as many as NCCL takes.
    """
    if backend != "nccl":
        return None
    # Kernels of communication are few and wait for others: behind a queue of large matmuls they would make these wait.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if most_blocks is not None:
        options.config.max_ctas = most_blocks
    return options


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


def hide_accelerators() -> None:
    """Have this process and all that it starts compute on the CPU; called before anything asks for an accelerator.

    Forked processes cannot use one whose driver their parent has started, and asking for the number of devices starts
    it: autograd does so in its first backward pass, after which no child of a process that sees a GPU can go backward.
    """
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pick_device(local_rank: int) -> torch.device:
    """Choose a worker's device and make it the current one: an accelerator, or the CPU where there is none.

    Workers of a host with fewer accelerators share these in turn.

    Args:
        local_rank: rank of the worker among those of its host, from 0.
    """
    accelerator = accelerator_type()
    if accelerator is None:
        return torch.device("cpu")
    # Read when the device is first used. Each process group has a stream: with the usual 8 hardware queues, streams of
    # a tensor-parallel worker would wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # All connections of a communicator are made with it: at the first use of an algorithm, as usual, hosts would meet
    # in the middle of a step, each behind other work.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    device = torch.device(accelerator, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def _own_backend(device: torch.device, local_size: int) -> str:
    """Return the backend that a worker could use, if the others can and none of them has its device.

    A process may see one device of many (CUDA_VISIBLE_DEVICES, as Slurm sets it with --gpus-per-task=1): how many it
    sees says nothing where the driver identifies them.
    """
    if device.type != "cpu" and not _device_identity(device) and local_size > torch.accelerator.device_count():
        return "gloo"
    return backend_of_device(device)


def agree_on_backend(store: Store, rank: int, size: int, backend: str, device: torch.device) -> str:
    """Return the backend of all workers: the one that all of them can use, else gloo; a collective of the workers.

    Workers also share a device if each of them sees it as its first one (CUDA_VISIBLE_DEVICES set for each process):
    devices are compared by the identity that the driver gives them.

    Args:
        store: store of all workers, for this exchange alone.
        rank: rank of this worker, from 0.
        size: number of workers, over all hosts.
        backend: backend that this worker could use.
        device: device of this worker.
    """
    store.set(f"{rank}", f"{backend} {_device_identity(device)}")
    cards = [card.decode().split(" ", 1) for card in store.multi_get([f"{rank}" for rank in range(size)])]
    backends, devices = {card[0] for card in cards}, [card[1] for card in cards if card[1]]
    is_shared = len(set(devices)) < len(devices)
    return "gloo" if len(backends) > 1 or is_shared else backend


def _device_identity(device: torch.device) -> str:
    """Return what identifies a device among those of all hosts; empty for the CPU, and where the driver gives none."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _group_backend(device_type: str) -> str:
    """Return the default group's backend for a type of device; its configuration reads "cpu:gloo,cuda:nccl"."""
    parts = (part.partition(":") for part in dist.get_backend_config().split(","))
    backends = {device: backend for device, _, backend in parts}
    return backends.get(device_type, str(dist.get_backend()))
