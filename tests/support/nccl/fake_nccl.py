"""A c10d backend over gloo that behaves as NCCL does towards streams, and records every launch and every wait.

NCCL's operations are kernels on a stream of their communicator. A call returns at once; the kernel begins behind what
the compute stream has been given so far, and behind the communicator's earlier kernels; ``Work.wait`` lets the compute
stream wait, not the host. Here gloo computes on copies, and the caller's tensors show what a GPU could show:

    between launch and wait    an output has NaN, or the least integer: who reads it too early computes with that
    at the wait                an input must be unchanged, and an output untouched: else ``changed`` names the launch

What is recorded are the facts that decide whether NCCL could hang, see :mod:`.launch_laws`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

NAME = "fake_nccl"
CHANNEL, CHANNEL_BLOCKS = "channel", 8
# The most blocks of one kernel, where the communicator has no limit (NCCL 2.27, MAXCHANNELS for one peer in paths.cc).
BLOCKS = 32
# Frames between the line that asks for a communication and the call of the backend.
CARRIERS = ("/tests/support/nccl/", "/runtime/transport/", "/runtime/progress/watched_transport", "/torch/")


@dataclass(slots=True)
class Launch:
    """One communication kernel.

    Attributes:
        group: the ranks of its communicator, and the communicator's number among all that the process made.
        number: its number among the launches of the communicator, from 0.
        kind: the collective; "send" and "recv" for point-to-point kernels.
        form: what all ranks of a collective must agree on: its elements in all, and the dtype.
        nbytes: bytes of the tensors.
        line: file and line that asked for it.
        in_flight: own launches before it, by index, for which the compute stream does not wait yet.
        blocks: the most thread blocks that a kernel of the communicator has, one on each multiprocessor.
        phase: "connect" before the first step, then the number of the step.
        waited: whether the compute stream waits for it at some time.
        changed: what was written while the kernel could run: "input" or "output"; "" if nothing was.
    """

    group: tuple[tuple[int, ...], str]
    number: int
    kind: str
    form: tuple[Any, ...]
    nbytes: int
    line: str
    in_flight: tuple[int, ...]
    blocks: int
    phase: str
    waited: bool = False
    changed: str = ""


@dataclass
class Recorder:
    """The launches of this process in the order of the calls, and its communicators in the order of their first use."""

    launches: list[Launch] = field(default_factory=list)
    communicators: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    phase: str = "connect"
    open: set[int] = field(default_factory=set)


RECORDER = Recorder()


def find_caller() -> tuple[str, str, int]:
    """Return file, function and line of the innermost frame that is not part of what carries messages."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in CARRIERS):
        frame = frame.f_back
    return ("", "", 0) if frame is None else (Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno)


def name_caller() -> str:
    """Return file and line of :func:`find_caller`."""
    file, _, line = find_caller()
    return f"{file}:{line}"


class FakeWork(dist.Work):
    """A launched kernel; its wait is the compute stream's.

    Args:
        index: index of the launch in the recorder.
        inner: gloo's work on the copies.
        inputs: the caller's tensors that the kernel reads, each with the copy that travels.
        outputs: the caller's tensors that the kernel writes, each with the copy that holds the result.
    """

    def __init__(
        self,
        index: int,
        inner: dist.Work,
        inputs: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__()
        self._index, self._inner = index, inner
        self._inputs = [(tensor, copy.clone()) for tensor, copy in inputs]
        self._outputs = list(outputs)
        for tensor, _ in self._outputs:
            poison(tensor)
        self._poisoned = [copy_to_host(tensor) for tensor, _ in self._outputs]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        launch = RECORDER.launches[self._index]
        if launch.waited:
            return True
        # What is compared here no GPU's host would read.
        with torch._C.DisableTorchFunction():
            self._inner.wait()
            if any(not same_bits(tensor, copy) for tensor, copy in self._inputs):
                launch.changed = "input"
            for (tensor, result), poisoned in zip(self._outputs, self._poisoned, strict=True):
                if not same_bits(tensor, poisoned):
                    launch.changed = "output"
                # Through .data, as a kernel writes: autograd's version counter does not see it.
                tensor.data.copy_(result)
            launch.waited = True
            RECORDER.open.discard(self._index)
            self._inputs, self._outputs = [], []
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, which gloo carries: the device may be a pretended one."""
    return tensor.detach().to("cpu", copy=True)


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor by what no result has: NaN, or the least integer."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.data.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min or 255)


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN included."""
    tensor, other = (copy_to_host(t).contiguous().view(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(tensor, other)


class FakeNccl(dist.ProcessGroup):
    """A communicator: gloo's group on copies of the tensors, its launches recorded."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._key: tuple[tuple[int, ...], str] | None = None
        self._number, self._name, self._blocks = 0, "", BLOCKS

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        # Read while the group is known, and kept: torch asks once more after it has dropped the group.
        self._name = self._name or dist.distributed_c10d._world.pg_names[self]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        # The transport limits the blocks of NCCL's channels, and of no other group.
        self._blocks = CHANNEL_BLOCKS if description.startswith(CHANNEL) else BLOCKS

    def _launch(
        self,
        kind: str,
        form: tuple[Any, ...],
        work: dist.Work,
        inputs: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
    ) -> FakeWork:
        if self._key is None:
            self._key = tuple(dist.get_process_group_ranks(self)), self.group_name
            RECORDER.communicators.append(self._key)
        nbytes = sum(tensor.nbytes for tensor, _ in (inputs or outputs))
        index, in_flight = len(RECORDER.launches), tuple(sorted(RECORDER.open))
        launch = Launch(
            self._key, self._number, kind, form, nbytes, name_caller(), in_flight, self._blocks, RECORDER.phase
        )
        RECORDER.launches.append(launch)
        RECORDER.open.add(index)
        self._number += 1
        return FakeWork(index, work, inputs, outputs)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> FakeWork:
        (tensor,) = tensors
        copy = copy_to_host(tensor)
        work = self._inner.allreduce([copy], opts or c10d.AllreduceOptions())
        return self._launch("all_reduce", (tensor.numel(), tensor.dtype), work, [], [(tensor, copy)])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> FakeWork:
        (tensor,) = tensors
        copy, is_source = copy_to_host(tensor), opts.rootRank == self.rank()
        work = self._inner.broadcast([copy], opts)
        sides = ([(tensor, copy)], []) if is_source else ([], [(tensor, copy)])
        return self._launch("broadcast", (tensor.numel(), tensor.dtype, opts.rootRank), work, *sides)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> FakeWork:
        (tensor,), (parts,) = inputs, outputs
        copy, copies = copy_to_host(tensor), [copy_to_host(part) for part in parts]
        work = self._inner.allgather([copies], [copy], opts or c10d.AllgatherOptions())
        form = tensor.numel() * self.size(), tensor.dtype
        return self._launch(
            "all_gather, of a list", form, work, [(tensor, copy)], list(zip(parts, copies, strict=True))
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> FakeWork:
        copy, whole = copy_to_host(tensor), copy_to_host(output)
        work = self._inner._allgather_base(whole, copy, opts or c10d.AllgatherOptions())
        # In place the part is a piece of the whole: its own place is written by what stood there.
        in_place = tensor.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        sources = [] if in_place else [(tensor, copy)]
        return self._launch("all_gather", (output.numel(), output.dtype), work, sources, [(output, whole)])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> FakeWork:
        (total,), (parts,) = outputs, inputs
        copies, result = [copy_to_host(part) for part in parts], copy_to_host(total)
        work = self._inner.reduce_scatter([result], [copies], opts or c10d.ReduceScatterOptions())
        form = total.numel() * self.size(), total.dtype
        return self._launch(
            "reduce_scatter, of a list", form, work, list(zip(parts, copies, strict=True)), [(total, result)]
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> FakeWork:
        copy, result = copy_to_host(tensor), copy_to_host(output)
        work = self._inner._reduce_scatter_base(result, copy, opts or c10d.ReduceScatterOptions())
        return self._launch(
            "reduce_scatter", (tensor.numel(), tensor.dtype), work, [(tensor, copy)], [(output, result)]
        )

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> FakeWork:
        copy, result = copy_to_host(tensor), copy_to_host(output)
        work = self._inner.alltoall_base(result, copy, list(received), list(sent), opts or c10d.AllToAllOptions())
        return self._launch("all_to_all", (tensor.dtype,), work, [(tensor, copy)], [(output, result)])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        copy = copy_to_host(tensor)
        work = self._inner.send([copy], peer, tag)
        return self._launch("send", (tensor.numel(), tensor.dtype), work, [(tensor, copy)], [])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,) = tensors
        copy = copy_to_host(tensor)
        work = self._inner.recv([copy], peer, tag)
        return self._launch("recv", (tensor.numel(), tensor.dtype), work, [], [(tensor, copy)])

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._inner.barrier(opts or c10d.BarrierOptions())


def create_fake_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FakeNccl:
    """Return a communicator; torch calls this for every process group of the backend."""
    return FakeNccl(store, rank, size, timeout)


def use_fake_nccl() -> None:
    """Register the backend in this process, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_fake_nccl, devices=["cpu", "cuda"])
