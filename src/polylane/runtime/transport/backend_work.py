"""Operations of torch.distributed under way: waited for, put in their place, and blamed on whoever is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.failure import reads_like_peer_loss


class Blame:
    """A context in which a backend's "connection closed" becomes a PeerLost that says whose, and during what."""

    __slots__ = ("_doing", "_peer", "_tensor")

    def __init__(self, peer: int | None, doing: str, tensor: Tensor | None = None) -> None:
        self._peer = peer
        self._doing = doing
        self._tensor = tensor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if error is None or not reads_like_peer_loss(error):
            return
        what = "" if self._tensor is None else f" {self._tensor.dtype} {tuple(self._tensor.shape)}"
        raise PeerLost(self._peer, self._doing + what, str(error)) from error


class Transfer:
    """One operation of the backend, under way."""

    __slots__ = ("_blame", "_target", "_unsent", "_wire", "_work")

    def __init__(
        self,
        work: dist.Work,
        blame: Blame,
        wire: Tensor,
        target: Tensor | None = None,
        unsent: set[Transfer] | None = None,
    ) -> None:
        self._work: dist.Work | None = work
        self._blame = blame
        self._wire = wire  # what the backend reads or writes
        self._target = target  # what the caller reads, where that is another piece of memory
        self._unsent = unsent
        if unsent is not None:
            unsent.add(self)

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`."""
        if self._work is not None:
            if self._unsent is not None:
                self._unsent.discard(self)
            with self._blame:
                self._work.wait()
            self._work = None
            if self._target is not None and self._target.data_ptr() != self._wire.data_ptr():
                self._target.copy_(self._wire)
        return self._wire if self._target is None else self._target


class Finished:
    """One operation of the backend whose result is made of what it wrote.

    Args:
        finish: makes the result.
        kept: what the backend reads or writes, to be kept alive.
    """

    __slots__ = ("_blame", "_finish", "_kept", "_result", "_work")

    def __init__(self, work: dist.Work, blame: Blame, finish: Callable[[], Tensor], kept: object) -> None:
        self._work, self._blame, self._finish, self._kept = work, blame, finish, kept
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`."""
        if self._result is None:
            with self._blame:
                self._work.wait()
            self._result = self._finish()
            self._kept = None
        return self._result


class Exchanged:
    """A piece from each rank.

    Args:
        coming: the bytes of all pieces, one after the other; None where there are none to wait for.
        order: which of the pieces comes how-manieth in these bytes.
        pieces: where they go; the first of ``order`` takes the first bytes.
    """

    __slots__ = ("_coming", "_order", "_pieces")

    def __init__(self, coming: Finished | None, order: Sequence[int], pieces: list[Tensor]) -> None:
        self._coming, self._order, self._pieces = coming, order, pieces

    def wait(self) -> list[Tensor]:
        """See :meth:`.protocol.Outcome.wait`."""
        if self._coming is not None:
            whole, start = self._coming.wait(), 0
            for index in self._order:
                place = as_bytes(self._pieces[index])
                place.copy_(whole[start : start + place.numel()])
                start += place.numel()
            self._coming = None
        return self._pieces


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, which a backend carries whatever its dtype."""
    return (
        torch.view_as_real(tensor).view(-1).view(torch.uint8)
        if tensor.is_complex()
        else tensor.view(-1).view(torch.uint8)
    )


def as_real(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as numbers that a backend sums."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
