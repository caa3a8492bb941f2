"""Staged transport: the tensors of an accelerator, carried by a transport of CPU tensors, through pinned host memory.

For workers that share a device, between which NCCL refuses to connect, and for hosts of which only some have devices.

    send, or start of a sum    device ──copy on its stream──▶ pinned buffer ──(event: copied)──▶ inner transport
    receive, or end of a sum   inner transport ──▶ pinned buffer ──copy on its stream──▶ device

The thread waits for the first copy, since the inner transport reads host memory at once, and so for all kernels before
it on the stream. It does not wait for the second one: kernels on the same stream come after it, and torch's allocator
of pinned memory does not hand out a buffer again before the copies from it are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.transport import protocol
from polylane.runtime.transport.protocol import Deferred, FinishedTransfer, PendingResult, PendingTransfer, Transport
from polylane.runtime.workers.world import World


@dataclass(frozen=True)
class HostStaging:
    """Copies between a device and pinned host memory; on the CPU itself, where tests run it, plain copies.

    Attributes:
        device: device of the tensors that are staged.
    """

    device: torch.device

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in host memory, complete on return; the caller owns it."""
        return self.begin_to_host(tensor).wait()

    def begin_to_host(self, tensor: Tensor) -> PendingTransfer:
        """Start a contiguous copy to host memory; its wait is for what the stream was given before, and no more."""
        wire = protocol.make_contiguous(tensor)
        host = self.new_buffer(wire.shape, wire.dtype).copy_(wire, non_blocking=True)
        if self.device.type == "cpu" or not wire.numel():
            return FinishedTransfer(host)
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))

        def finish() -> Tensor:
            event.synchronize()
            return host

        return Deferred(finish)

    def to_device(self, host: Tensor) -> Tensor:
        """Return a copy on the device, for kernels on the current stream; ``host`` may be overwritten afterwards."""
        return self._pinned(host).to(self.device, non_blocking=True, copy=True)

    def write_back(self, host: Tensor, target: Tensor) -> Tensor:
        """Overwrite a tensor on the device by as many elements of host memory, on the current stream; return it."""
        return target.detach().copy_(self._pinned(host).view(target.shape), non_blocking=True)

    def new_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor in host memory, pinned if it is for an accelerator."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.device.type != "cpu")

    def _pinned(self, host: Tensor) -> Tensor:
        """Return the values in pinned memory that the inner transport cannot overwrite, such as another's block."""
        return self.new_buffer(host.shape, host.dtype).copy_(host) if self.device.type != "cpu" else host


class StagedTransport:
    """Tensors of one device over a transport of CPU tensors; the interface is :class:`~.protocol.Transport`.

    Args:
        inner: transport of CPU tensors, with the channels and groups of this one.
        device: device of this worker's tensors.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        self.rank, self.size, self.counters = inner.rank, inner.size, inner.counters
        self.is_ordered = inner.is_ordered
        self._inner, self._staging = inner, HostStaging(device)

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        pending = self._inner.send(self._staging.to_host(tensor), peer)
        return self._then(pending, lambda _: tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        return self._then(self._inner.receive(shape, dtype, peer), self._staging.to_device)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        protocol.require_summable(tensor)
        members = protocol.normalize_group(ranks, self.size)
        if members == (self.rank,):
            return FinishedTransfer(tensor)
        pending = self._inner.all_reduce(self._staging.to_host(tensor), members)
        target = tensor.detach()
        return self._then(pending, lambda summed: self._staging.write_back(summed, target))

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        pending = self._inner.all_gather(self._staging.to_host(tensor), ranks, sizes)
        return self._then(pending, self._staging.to_device)

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        pending = self._inner.reduce_scatter(self._staging.to_host(tensor), ranks, sizes)
        return self._then(pending, self._staging.to_device)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        members = protocol.normalize_group(ranks, self.size)
        if members == (self.rank,):
            return FinishedTransfer(tensor)
        if source == self.rank:
            pending = self._inner.broadcast(self._staging.to_host(tensor), source, members)
            return self._then(pending, lambda _: tensor)
        pending = self._inner.broadcast(self._staging.new_buffer(tensor.shape, tensor.dtype), source, members)
        target = tensor.detach()
        return self._then(pending, lambda values: self._staging.write_back(values, target))

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        protocol.require_pieces(pieces, shapes, ranks)
        own_index = tuple(ranks).index(self.rank)
        # This rank's own piece stays on the device: the inner transport is given an empty one in its place.
        staged = [
            torch.empty(0, dtype=piece.dtype) if i == own_index else self._staging.to_host(piece)
            for i, piece in enumerate(pieces)
        ]
        pending, own_piece = self._inner.all_to_all(staged, shapes, ranks), pieces[own_index]

        def finish(parts: list[Tensor]) -> list[Tensor]:
            return [own_piece if i == own_index else self._staging.to_device(part) for i, part in enumerate(parts)]

        return self._then(pending, finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._inner.all_gather_object(value)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()

    @staticmethod
    def _then(pending: PendingResult[Any], make: Callable[[Any], Any]) -> Deferred[Any]:
        return Deferred(lambda: make(pending.wait()))


class StagedConnections:
    """Constructor of staged transports.

    Args:
        connect: constructor of the inner transports, for worlds on the CPU.
        device: device of this worker's tensors.
    """

    def __init__(self, connect: Callable[..., Transport], device: torch.device) -> None:
        self._connect, self._device = connect, device

    def __call__(self, world: World, *arguments: Any, **options: Any) -> StagedTransport:
        """Build a transport; the arguments are those of :class:`.c10d.C10dTransport`."""
        return StagedTransport(self._connect(world.on_host(), *arguments, **options), self._device)
