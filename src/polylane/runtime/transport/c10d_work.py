"""Pending operations of torch.distributed, and the error that names the peer where one fails."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.transport.protocol import Deferred, R, copy_back
from polylane.runtime.workers.failure import looks_like_peer_loss


class BlamePeer:
    """A context in which a backend's "connection closed" becomes a PeerLost that says whose, and during what."""

    __slots__ = ("_doing", "_peer", "_tensor")

    def __init__(self, peer: int | None, doing: str, tensor: Tensor | None = None) -> None:
        self._peer = peer
        self._doing = doing
        self._tensor = tensor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is None or not looks_like_peer_loss(error):
            return
        what = "" if self._tensor is None else f" {self._tensor.dtype} {tuple(self._tensor.shape)}"
        raise PeerLost(self._peer, self._doing + what, str(error)) from error


class BackendTransfer(Deferred[Tensor]):
    """One operation of the backend on one tensor, under way.

    Args:
        work: the backend's handle of it.
        blame: turns the end of a connection into an error that names the peer.
        wire: what the backend reads or writes.
        target: what the caller reads, where that may be another piece of memory; default: ``wire``.
        unsent: sends that nobody has waited for yet, of which this is one until its wait.
    """

    __slots__ = ("_blame", "_target", "_unsent", "_wire", "_work")

    def __init__(
        self,
        work: dist.Work,
        blame: BlamePeer,
        wire: Tensor,
        target: Tensor | None = None,
        unsent: set[BackendTransfer] | None = None,
    ) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._blame = blame
        self._wire, self._target = wire, target
        self._unsent = unsent
        if unsent is not None:
            unsent.add(self)

    def _finish(self) -> Tensor:
        assert self._work is not None
        if self._unsent is not None:
            self._unsent.discard(self)
        with self._blame:
            self._work.wait()
        self._work = None
        return self._wire if self._target is None else copy_back(self._wire, self._target)


class BackendResult(Deferred[R]):
    """One operation of the backend whose result is made of what it wrote.

    Args:
        work: the backend's handle of it.
        blame: turns the end of a connection into an error that names the peer.
        make: makes the result, once the operation is done.
        kept: what the backend reads or writes, to be kept alive until then.
    """

    __slots__ = ("_blame", "_kept", "_make", "_work")

    def __init__(self, work: dist.Work, blame: BlamePeer, make: Callable[[], R], kept: object) -> None:
        super().__init__()
        self._work, self._blame, self._make, self._kept = work, blame, make, kept

    def _finish(self) -> R:
        with self._blame:
            self._work.wait()
        result = self._make()
        self._kept = None
        return result


def view_as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, which a backend carries whatever its dtype."""
    return (
        torch.view_as_real(tensor).view(-1).view(torch.uint8)
        if tensor.is_complex()
        else tensor.view(-1).view(torch.uint8)
    )


def view_as_real(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as numbers that a backend sums."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
