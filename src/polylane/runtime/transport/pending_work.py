"""Pending operations of torch.distributed: their ends, whom an error names, and tensors as a backend takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.protocol import Deferred, R
from polylane.runtime.workers.failure import looks_like_peer_loss

# Of a large sum of two workers: buffers of this size are taken, and while a piece is added the next one is sent.
PIECE_BYTES = 4 << 20


@dataclass(slots=True)
class BlamePeer:
    """Context manager that turns a backend's "connection closed" into a PeerLost.

    Attributes:
        peer: rank of the peer to name, or None if any member may be the lost one.
        doing: what this worker was doing, in words, as ``"sending"``.
        tensor: tensor of the operation, whose dtype and shape the error names; or None.
    """

    peer: int | None
    doing: str
    tensor: Tensor | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is None or not looks_like_peer_loss(error):
            return
        description = "" if self.tensor is None else f" {self.tensor.dtype} {tuple(self.tensor.shape)}"
        raise PeerLost(self.peer, self.doing + description, str(error)) from error


@dataclass(slots=True)
class Exchange:
    """A message to a peer and one from it, waited for as one operation of the backend.

    Attributes:
        receipt, dispatch: the backend's handles of the two; None where nothing is sent.
        unsent: handles of messages that were not waited for yet, among which ``dispatch`` is until then: gloo loses a
            message whose handle is freed before it has been sent.
    """

    receipt: dist.Work | None
    dispatch: dist.Work | None
    unsent: set[Any]

    def __post_init__(self) -> None:
        if self.dispatch is not None:
            self.unsent.add(self.dispatch)

    def wait(self) -> None:
        if self.receipt is not None:
            self.receipt.wait()
        if self.dispatch is not None:
            self.dispatch.wait()
            self.unsent.discard(self.dispatch)


def sum_pieces(exchange: Callable[[Tensor, Tensor], Exchange], values: Tensor) -> None:
    """Add what a peer has to a vector, in place, piece by piece: while one is added, the next one is on its way.

    The bytes are those of a ring of two, each way the whole vector; buffers hold two pieces of :data:`PIECE_BYTES`.

    Args:
        exchange: sends its second argument to the peer, and receives into the first.
        values: contiguous; the peer gives as many.
    """
    pieces = values.split(max(1, PIECE_BYTES // values.element_size()))
    buffers = [torch.empty_like(piece) for piece in pieces[:2]]

    def start(index: int) -> Exchange:
        return exchange(buffers[index % 2][: len(pieces[index])], pieces[index])

    coming = start(0)
    for index, piece in enumerate(pieces):
        arriving, coming = coming, start(index + 1) if index + 1 < len(pieces) else coming
        arriving.wait()
        piece.add_(buffers[index % 2][: len(piece)])


def wait_for_work(
    work: dist.Work | Exchange, blame: BlamePeer, make: Callable[[], R], buffers: object = None
) -> Deferred[R]:
    """Return a pending operation of the backend, whose result is built from the buffers that it wrote.

    Args:
        work: the backend's handle of the operation.
        blame: turns the end of a connection into an error that names the peer.
        make: builds the result, once the operation is complete.
        buffers: buffers that the backend reads or writes beside those of ``make``; alive until the result is built.
    """

    return Deferred(partial(_finish_work, work, blame, make, buffers), work)


def _finish_work(work: dist.Work | Exchange, blame: BlamePeer, make: Callable[[], R], buffers: object) -> R:
    with blame:
        work.wait()
    return make()


def is_filled(sizes: Sequence[int], longest: int) -> bool:
    """Return whether parts of these sizes, padded to the longest one, are one behind the other without a gap."""
    total = sum(sizes)
    return all(size == min(longest, max(0, total - index * longest)) for index, size in enumerate(sizes))


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of a matrix's rows, in their order, so that it does not depend on who sums."""
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total


def view_as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 vector, which a backend carries for any dtype."""
    return view_as_real(tensor).view(-1).view(torch.uint8)


def view_as_real(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as real numbers, which a backend sums: complex ones get a dimension of 2."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
