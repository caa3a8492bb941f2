"""Tensors over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.failure import reads_like_peer_loss
from polylane.runtime.transport.protocol import Counters, Done, Pending, as_sent, normalised, require_summable
from polylane.runtime.world import TIMEOUT, World

Channel = tuple[int, int]  # (sender, receiver)


class _Blame:
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


class _Transfer:
    """One operation of the backend, under way."""

    __slots__ = ("_blame", "_target", "_unsent", "_wire", "_work")

    def __init__(
        self,
        work: dist.Work,
        blame: _Blame,
        wire: Tensor,
        target: Tensor | None = None,
        unsent: set[_Transfer] | None = None,
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


@dataclass
class _Groups:
    """The process groups of one transport."""

    channels: dict[Channel, tuple[dist.ProcessGroup, int]] = field(default_factory=dict)
    sums: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    control: dist.ProcessGroup | None = None  # carries objects, which live on the CPU
    made: list[dist.ProcessGroup] = field(default_factory=list)  # of these, those that are nobody else's

    def make(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """A new group; a collective over the whole world."""
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
        if dist.get_rank() in ranks:
            self.made.append(group)
        return group

    def release(self) -> None:
        """End the groups made here, and hold none any more.

        A group that lives on into the end of the interpreter may abort the process from one of gloo's threads, which
        then still has a tensor of Python's to let go of.
        """
        for group in self.made:
            with contextlib.suppress(ValueError):  # it has ended with the world
                dist.destroy_process_group(group)
        self.made.clear()
        self.channels.clear()
        self.sums.clear()
        self.control = None


class Transport:
    """The workers of a world over torch.distributed; the interface is :class:`~.protocol.Transport`.

    On gloo all messages share the default group: it carries every dtype, and one direction does not hold up the other
    (256 KB there and back: 0.2 ms, in one group as in two). NCCL runs the operations of one communicator one after the
    other, and knows no tags: each directed channel has a communicator of its own there, so that opposite directions
    never wait for each other.

    Args:
        world: this worker among all.
        channels: every (sender, receiver) pair that will be used, in the same order at every rank.
        groups: the ranks of every all-reduce, in the same order at every rank.
        own_groups: never use the world's own group for sums, which others may be using in another order.
        tag: a number for each transport of the same world, so that their messages never mix; only gloo heeds it.
    """

    def __init__(
        self,
        world: World,
        channels: Iterable[Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.counters = Counters()
        self._device = world.device
        self._tag = tag
        # Sends that nobody has waited for yet: gloo loses a message whose handle is dropped before it has left.
        self._unsent: set[_Transfer] = set()
        has_tags = world.backend == "gloo"
        # Making a group is a collective over the whole world: every rank goes through the same lists, in their order.
        self._groups = _Groups()
        weakref.finalize(self, self._groups.release)  # with the transport, and at the latest before the interpreter
        self._open_channels(channels, shared=has_tags)
        self._open_groups(groups, own_groups)
        if self.size > 1:
            control = _default_group() if has_tags else self._groups.make(range(self.size), backend="gloo")
            self._groups.control = control
        if not has_tags:
            self._connect()

    def _open_channels(self, channels: Iterable[Channel], shared: bool) -> None:
        """The group of each of this rank's channels, and the peer's rank in that group."""
        for sender, receiver in dict.fromkeys(channels):
            if sender == receiver or not {sender, receiver} <= set(range(self.size)):
                raise ValueError(f"({sender}, {receiver}) is no channel between two of {self.size} workers")
            group = _default_group() if shared else self._groups.make((sender, receiver))
            if self.rank in (sender, receiver):
                peer = receiver if self.rank == sender else sender
                self._groups.channels[sender, receiver] = group, dist.get_group_rank(group, peer)

    def _open_groups(self, groups: Iterable[Iterable[int]], own: bool) -> None:
        for ranks in dict.fromkeys(normalised(group, self.size) for group in groups):
            if len(ranks) == 1:
                continue
            group = _default_group() if len(ranks) == self.size and not own else self._groups.make(ranks)
            if self.rank in ranks:
                self._groups.sums[ranks] = group

    def _connect(self) -> None:
        """Use every communicator once, in the same order everywhere.

        NCCL connects at the first use and waits there for the other side: left to the schedule, a ring of first uses
        would be a deadlock.
        """
        for (sender, _), (group, there) in self._groups.channels.items():
            token = torch.zeros(1, device=self._device)
            (group.send if self.rank == sender else group.recv)([token], there, 0).wait()
        for group in self._groups.sums.values():
            group.allreduce([torch.zeros(1, device=self._device)]).wait()

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """See :meth:`.protocol.Transport.send`.

        Raises:
            ValueError: the channel was not declared.
            PeerLost: the peer is already known to be gone.
        """
        group, there = self._channel(self.rank, peer)
        if tensor.numel() == 0:
            return Done(tensor)
        wire = as_sent(tensor)
        self.counters.add("send", wire)
        with (blame := _Blame(peer, "sending", wire)):
            # The group's own method: dist.isend only checks again, for 5 to 10 us.
            work = group.send([wire], there, self._tag)
        return _Transfer(work, blame, wire, unsent=self._unsent)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """See :meth:`.protocol.Transport.receive`.

        Raises:
            ValueError: the channel was not declared.
            PeerLost: the peer is already known to be gone.
        """
        group, there = self._channel(peer, self.rank)
        wire = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if wire.numel() == 0:
            return Done(wire)
        self.counters.add("receive", wire)
        with (blame := _Blame(peer, "receiving", wire)):
            work = group.recv([wire], there, self._tag)
        return _Transfer(work, blame, wire)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> Pending:
        """See :meth:`.protocol.Transport.all_reduce`.

        Raises:
            ValueError: the group was not declared, or this rank is not in it.
            TypeError: no backend sums the dtype.
        """
        require_summable(tensor)
        members = normalised(ranks, self.size)
        if members == (self.rank,) or tensor.numel() == 0:
            return Done(tensor)
        if members not in self._groups.sums:
            raise ValueError(f"rank {self.rank} has no group {members}: declare it when the transport is made")
        self.counters.add("all_reduce", tensor)
        wire = as_sent(tensor)
        with (blame := _Blame(None, f"summing over ranks {members}", wire)):
            work = self._groups.sums[members].allreduce([torch.view_as_real(wire) if wire.is_complex() else wire])
        return _Transfer(work, blame, wire, target=tensor.detach())

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`.protocol.Transport.all_gather_object`."""
        values: list[Any] = [value] * self.size
        if self._groups.control is not None:
            self.counters.add("object")
            with _Blame(None, "gathering objects"):
                dist.all_gather_object(values, value, group=self._groups.control)
        return values

    def gather_object(self, value: Any, destination: int) -> list[Any] | None:
        """See :meth:`.protocol.Transport.gather_object`."""
        if self._groups.control is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == destination else None
        self.counters.add("object")
        with _Blame(None, f"gathering objects at rank {destination}"):
            dist.gather_object(value, values, dst=destination, group=self._groups.control)
        return values

    def broadcast_object(self, value: Any, source: int) -> Any:
        """See :meth:`.protocol.Transport.broadcast_object`."""
        if self._groups.control is None:
            return value
        values = [value if self.rank == source else None]
        self.counters.add("object")
        with _Blame(source, "waiting for its object"):
            dist.broadcast_object_list(values, src=source, group=self._groups.control)
        return values[0]

    def barrier(self) -> None:
        """See :meth:`.protocol.Transport.barrier`."""
        if self._groups.control is not None:
            with _Blame(None, "waiting for all ranks"):
                dist.barrier(group=self._groups.control)

    def close(self) -> None:
        """See :meth:`.protocol.Transport.close`."""
        while self._unsent:
            next(iter(self._unsent)).wait()
        self._groups.release()

    def _channel(self, sender: int, receiver: int) -> tuple[dist.ProcessGroup, int]:
        try:
            return self._groups.channels[sender, receiver]
        except KeyError:
            raise ValueError(
                f"rank {self.rank} has no channel from {sender} to {receiver}: declare it when the transport is made"
            ) from None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None  # a world of more than one worker has joined one
    return group
