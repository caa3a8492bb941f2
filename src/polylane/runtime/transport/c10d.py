"""Transport over torch.distributed (c10d): gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.runtime.plain_data import plain_objects as objects
from polylane.runtime.transport import protocol
from polylane.runtime.transport.pending_work import (
    BlamePeer,
    Exchange,
    is_filled,
    sum_pieces,
    sum_rows,
    view_as_bytes,
    view_as_real,
    wait_for_work,
)
from polylane.runtime.transport.process_groups import CHANNEL, ProcessGroups
from polylane.runtime.transport.protocol import Deferred, FinishedTransfer, PendingResult, PendingTransfer
from polylane.runtime.transport.serial_thread import SerialThread
from polylane.runtime.workers.world import World

# Added to a transport's tag for messages that make up a collective of two, and for the pieces of large sums, which a
# thread of their own sends: so these mix neither with each other nor with those of the transport's channels.
_EXCHANGES, _PIECES = 1 << 16, 1 << 17
# Bytes up to which a sum of two is one message each way; its buffer is as large.
_SMALL_SUM = 64 << 10

# Bytes of a small and of a large collective of each kind, for which NCCL may use algorithms of different connections.
CONNECTED_BYTES = (8, 4 << 20)


class C10dTransport:
    """The workers of a world over torch.distributed; the interface is :class:`~.protocol.Transport`.

    The bytes that a backend sends are not visible here: the counters assume those of a ring algorithm, and for each
    piece of a broadcast or an exchange one copy to each rank that receives it.

    On gloo all messages share the default group: it carries every dtype, and one direction does not delay the other
    (256 KB there and back: 0.2 ms, in one group as in two). NCCL runs the operations of one communicator one after the
    other, and has no tags: there each directed channel has a communicator of its own, so that opposite directions
    never wait for each other. A message is a broadcast in it: torch keeps the tensors of a collective until its wait,
    but has the allocator hold those of a point-to-point operation back, as long as the channel is behind.

    A sum, gather, scatter or all-to-all of two workers over gloo is a message each way (:meth:`_exchange`), large sums
    in pieces: between two hosts over 1 Gb/s, gloo's own of 16 MB take a tenth to three quarters more time.

    Args:
        world: this worker among all workers.
        channels: every (sender, receiver) pair that will be used, in the same order at every rank.
        groups: the ranks of every collective, in the same order at every rank.
        tag: number that differs between transports of one world, so that their messages never mix; only gloo uses it.
        own_groups: never use the world's own group for sums, because others may use it in another order.
        exchanges: whether groups run all-to-alls: NCCL connects each pair of ranks for them.
    """

    def __init__(
        self,
        world: World,
        channels: Iterable[protocol.Channel] = (),
        groups: Iterable[Iterable[int]] = (),
        tag: int = 0,
        own_groups: bool = False,
        exchanges: bool = True,
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.counters = protocol.TransportCounters()
        self._device = world.device
        self._tag = tag
        # Sends that were not waited for yet: gloo loses a message whose handle is freed before it has been sent.
        self._unsent: set[Any] = set()
        self._threads: dict[tuple[int, ...], SerialThread] = {}  # of large sums, by the two members
        self.is_ordered = world.is_ordered
        # Making a group is a collective over the whole world: every rank goes through the same lists in their order.
        if world.size > 1:
            world.connect()
        self._groups = ProcessGroups(world)
        # Groups of gloo end with the transport, at the latest before the interpreter does. Those of NCCL only by
        # close(): to destroy one waits for its kernels, which after an error may be for ever.
        if not self.is_ordered:
            weakref.finalize(self, self._groups.destroy_groups)
        self._open_channels(channels)
        self._open_groups(groups, own_groups)
        if self.size > 1:
            is_ordered, members = self.is_ordered, range(self.size)
            self._groups.control = self._groups.make_group(members, "gloo") if is_ordered else self._groups.everyone
        if self.is_ordered:
            self._connect(exchanges)

    def _open_channels(self, channels: Iterable[protocol.Channel]) -> None:
        """Store the group of each of this rank's channels, and the peer's rank in that group."""
        for sender, receiver in dict.fromkeys(channels):
            protocol.require_channel(sender, receiver, self.size)
            pair = (sender, receiver)
            group = self._groups.make_group(pair, description=CHANNEL) if self.is_ordered else self._groups.everyone
            if self.rank in (sender, receiver):
                peer = receiver if self.rank == sender else sender
                self._groups.channels[sender, receiver] = group, dist.get_group_rank(group, peer)

    def _open_groups(self, groups: Iterable[Iterable[int]], own_groups: bool) -> None:
        for ranks in dict.fromkeys(protocol.normalize_group(group, self.size) for group in groups):
            if len(ranks) == 1:
                continue
            group = (
                self._groups.everyone if len(ranks) == self.size and not own_groups else self._groups.make_group(ranks)
            )
            if self.rank in ranks:
                self._groups.sums[ranks] = group

    def _connect(self, exchanges: bool) -> None:
        """Use every communicator for every kind of operation, small and large, in the same order at all ranks.

        NCCL connects at the first use of an algorithm, on the host, and waits for all members there: if a step decided
        the order, ranks that are at different places of it would wait for each other for ever. All-to-alls only where
        there are any: on eight H100s NCCL was seen to take 3.3 GB of each for them (NVIDIA/nccl#1685).
        """
        for nbytes in CONNECTED_BYTES:
            for (sender, receiver), (group, _) in self._groups.channels.items():
                buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
                self._start_message(group, sender, receiver, buffer).wait()
            for members, group in self._groups.sums.items():
                part = torch.zeros(nbytes // 8, dtype=torch.float64, device=self._device)
                parts = part.repeat(len(members))
                group.allreduce([part]).wait()
                group.all_gather_single(parts, part).wait()
                group.reduce_scatter_single(part, parts, dist.ReduceScatterOptions()).wait()
                if exchanges:
                    group.alltoall_base(torch.empty_like(parts), parts, [], [], dist.AllToAllOptions()).wait()
                group.broadcast([part], dist.BroadcastOptions()).wait()

    def _start_message(self, group: dist.ProcessGroup, sender: int, receiver: int, buffer: Tensor) -> dist.Work:
        """Start a message on an ordered backend: a broadcast from the sender in the group of a channel."""
        options = dist.BroadcastOptions()
        options.rootRank = 0 if sender < receiver else 1
        return group.broadcast([view_as_bytes(buffer)], options)

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        group, group_rank = self._channel(self.rank, peer)
        if tensor.numel() == 0:
            return FinishedTransfer(tensor)
        wire = protocol.make_contiguous(tensor)
        self.counters.count_sent("send", wire, wire.nbytes)
        with (blame := BlamePeer(peer, "sending", wire)):
            # The group's own method: dist.isend repeats checks, which take 5 to 10 us.
            work = (
                self._start_message(group, self.rank, peer, wire)
                if self.is_ordered
                else group.send([wire], group_rank, self._tag)
            )
        unsent = self._unsent

        def finish() -> Tensor:
            unsent.discard(pending)
            with blame:
                work.wait()
            return wire

        pending = Deferred(finish, work)
        unsent.add(pending)
        return pending

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        group, group_rank = self._channel(peer, self.rank)
        wire = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        if wire.numel() == 0:
            return FinishedTransfer(wire)
        self.counters.count_local("receive", wire)
        with (blame := BlamePeer(peer, "receiving", wire)):
            work = (
                self._start_message(group, peer, self.rank, wire)
                if self.is_ordered
                else group.recv([wire], group_rank, self._tag)
            )
        return wait_for_work(work, blame, lambda: wire)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        protocol.require_summable(tensor)
        group, members = self._group(ranks)
        if group is None or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        # Strided tensors are summed in a contiguous copy, which the wait copies back into the caller's.
        wire = protocol.make_contiguous(tensor)
        self.counters.count_sent("all_reduce", wire, protocol.all_reduce_bytes(wire, len(members)))
        target = tensor.detach()
        with (blame := BlamePeer(None, f"summing over ranks {members}", wire)):
            if self._is_pair(members):
                return self._sum_pair(group, members, wire, target, blame)
            work = group.allreduce([view_as_real(wire)])
        return wait_for_work(work, blame, lambda: protocol.copy_back(wire, target))

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        group, members = self._group(ranks)
        sizes = protocol.gathered_sizes(tensor, tuple(ranks).index(self.rank), ranks, sizes)
        wire = protocol.make_contiguous(tensor)
        if group is None or max(sizes) == 0:
            return FinishedTransfer(wire.clone())  # a new tensor by contract, also for one rank
        # The backend gathers equal parts in the order of the group: shorter ones are padded, and trimmed by join.
        longest, by_rank = max(sizes), dict(zip(ranks, sizes, strict=True))
        padded = wire if wire.numel() == longest else torch.cat([wire, wire.new_zeros(longest - wire.numel())])
        buffer = wire.new_empty(longest * len(members))
        self.counters.count_sent("all_gather", wire, padded.nbytes * (len(members) - 1))
        with (blame := BlamePeer(None, f"gathering from ranks {members}", wire)):
            if self._is_pair(members):
                own_part, peer_part = self._own_first(members, buffer.split(longest))
                own_part.copy_(padded)
                pending: dist.Work | Exchange = self._exchange(group, members, peer_part, padded)
            else:
                pending = group.all_gather_single(view_as_bytes(buffer), view_as_bytes(padded))

        def join() -> Tensor:
            # Equal parts but for shorter ones at the end are one behind the other: only the end is cut off.
            if tuple(ranks) == members and is_filled(sizes, longest):
                return buffer[: sum(sizes)]
            # The group is in ascending order, the result in the caller's.
            parts_by_rank = dict(zip(members, buffer.split(longest), strict=True))
            return torch.cat([parts_by_rank[rank][: by_rank[rank]] for rank in ranks])

        return wait_for_work(pending, blame, join, padded)

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        protocol.require_summable(tensor)
        protocol.require_flat(tensor)
        group, members = self._group(ranks)
        sizes = protocol.part_sizes(tensor.numel(), ranks, sizes)
        wire = protocol.make_contiguous(tensor)
        if group is None or wire.numel() == 0:
            return FinishedTransfer(wire.clone())
        by_rank, longest = dict(zip(ranks, wire.split(list(sizes)), strict=True)), max(sizes)
        own_elements, padded = by_rank[self.rank].numel(), wire
        if tuple(ranks) == members and is_filled(sizes, longest):
            missing = longest * len(members) - wire.numel()
            padded = torch.cat([wire, wire.new_zeros(missing)]) if missing else wire
        else:
            # Parts of different sizes are padded to the longest one, as in all_gather.
            padded = wire.new_zeros(longest * len(members))
            for padded_part, rank in zip(padded.split(longest), members, strict=True):
                padded_part[: by_rank[rank].numel()] = by_rank[rank]
        self.counters.count_sent("reduce_scatter", wire, padded.nbytes * (len(members) - 1) // len(members))
        blame = BlamePeer(None, f"summing parts over ranks {members}", wire)
        if not self.is_ordered:
            # gloo sums the whole vector at all ranks: to exchange the parts takes half the time (16 MiB, 2 to 4 ranks).
            if self._is_pair(members):
                own_part, peer_part = self._own_first(members, padded.split(longest))
                arrived = torch.empty_like(own_part)
                with blame:
                    pair = self._exchange(group, members, arrived, peer_part)
                return wait_for_work(pair, blame, lambda: (own_part + arrived)[:own_elements], padded)
            arrived = torch.empty_like(padded)
            with blame:
                exchange = group.alltoall_base(
                    view_as_bytes(arrived), view_as_bytes(padded), [], [], dist.AllToAllOptions()
                )
            rows = arrived.view(len(members), longest)
            return wait_for_work(exchange, blame, lambda: sum_rows(rows)[:own_elements], padded)
        total = wire.new_empty(longest)
        with blame:
            options = dist.ReduceScatterOptions()
            work = group.reduce_scatter_single(view_as_real(total), view_as_real(padded), options)
        return wait_for_work(work, blame, lambda: total[:own_elements], padded)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        group, members = self._group(ranks)
        if group is None or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        protocol.require_source(source, members)
        wire = protocol.make_contiguous(tensor)
        if source == self.rank:
            self.counters.count_sent("broadcast", wire, wire.nbytes * (len(members) - 1))
        else:
            self.counters.messages["broadcast"] += 1
        options = dist.BroadcastOptions()
        options.rootRank = members.index(source)
        with (blame := BlamePeer(None, f"broadcasting from rank {source}", wire)):
            work = group.broadcast([view_as_bytes(wire)], options)
        target = tensor.detach()
        return wait_for_work(work, blame, lambda: protocol.copy_back(wire, target))

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        group, members = self._group(ranks)
        protocol.require_pieces(pieces, shapes, ranks)
        ranks = tuple(ranks)
        own_piece, peers = pieces[ranks.index(self.rank)], [rank for rank in members if rank != self.rank]
        if group is None:
            return FinishedTransfer([own_piece])
        result = [
            own_piece if rank == self.rank else own_piece.new_empty(tuple(shape))
            for rank, shape in zip(ranks, shapes, strict=True)
        ]
        # One all-to-all of bytes for all pieces; this rank's own piece is not part of it.
        leaving = {rank: view_as_bytes(protocol.make_contiguous(pieces[ranks.index(rank)])) for rank in peers}
        coming = {rank: view_as_bytes(result[ranks.index(rank)]).numel() for rank in peers}
        for rank in peers:
            if leaving[rank].numel():
                self.counters.count_sent("all_to_all", leaving[rank], leaving[rank].numel())
        payload = torch.cat([leaving[rank] for rank in peers])
        got = payload.new_empty(sum(coming.values()))
        received = [coming.get(rank, 0) for rank in members]
        sent = [leaving[rank].numel() if rank in leaving else 0 for rank in members]
        with (blame := BlamePeer(None, f"exchanging pieces among ranks {members}", own_piece)):
            if self._is_pair(members):
                pending: dist.Work | Exchange = self._exchange(group, members, got, payload)
            else:
                pending = group.alltoall_base(got, payload, received, sent, dist.AllToAllOptions())

        def part() -> list[Tensor]:
            for rank, came in zip(peers, got.split([coming[rank] for rank in peers]), strict=True):
                view_as_bytes(result[ranks.index(rank)]).copy_(came)
            return result

        return wait_for_work(pending, blame, part, payload)

    def _is_pair(self, members: Sequence[int]) -> bool:
        return len(members) == 2 and not self.is_ordered

    def _own_first(self, members: Sequence[int], parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the parts of this rank and of its peer, of the parts of two members in ascending order."""
        own_index = members.index(self.rank)
        return parts[own_index], parts[1 - own_index]

    def _exchange(
        self, group: dist.ProcessGroup, members: Sequence[int], coming: Tensor, leaving: Tensor, tag: int = _EXCHANGES
    ) -> Exchange:
        """Start a message to the other of two members, and one from it into ``coming``; gloo only."""
        peer, tag = 1 - members.index(self.rank), tag + self._tag
        receipt = group.recv([view_as_bytes(coming)], peer, tag) if coming.numel() else None
        dispatch = group.send([view_as_bytes(leaving)], peer, tag) if leaving.numel() else None
        return Exchange(receipt, dispatch, self._unsent)

    def _sum_pair(
        self, group: dist.ProcessGroup, members: tuple[int, ...], wire: Tensor, target: Tensor, blame: BlamePeer
    ) -> PendingTransfer:
        """Start a sum of two members; a large one piece by piece in the group's own thread."""
        if wire.nbytes <= _SMALL_SUM:
            arrived = torch.empty_like(wire)
            exchange = self._exchange(group, members, arrived, wire)
            return wait_for_work(exchange, blame, lambda: protocol.copy_back(wire.add_(arrived), target))
        # A thread for each group: sums of different groups may be started in different orders at their ranks.
        thread = self._threads.setdefault(members, SerialThread("polylane-sums"))
        start = partial(self._exchange, group, members, tag=_PIECES)
        future = thread.submit(sum_pieces, start, view_as_real(wire).view(-1))

        def finish() -> Tensor:
            with blame:
                future.result()
            return protocol.copy_back(wire, target)

        return Deferred(finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        if self._groups.control is None:
            return [value]
        self.counters.count_local("object")
        with BlamePeer(None, "gathering objects"):
            return objects.all_gather(value, self._groups.control)

    def barrier(self) -> None:
        if self._groups.control is not None:
            with BlamePeer(None, "waiting for all ranks"):
                dist.barrier(group=self._groups.control)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close(wait=False)  # sums that nobody has waited for may never end
        # Waited for before the groups are destroyed: gloo would drop what has not been sent.
        while self._unsent:
            message = next(iter(self._unsent))
            message.wait()
            self._unsent.discard(message)
        self._groups.destroy_groups()

    def _group(self, ranks: Iterable[int]) -> tuple[dist.ProcessGroup | None, tuple[int, ...]]:
        """Return the process group of ranks (None for this rank alone), and the ranks in ascending order."""
        members = protocol.normalize_group(ranks, self.size)
        if members == (self.rank,):
            return None, members
        if members not in self._groups.sums:
            raise protocol.undeclared(self.rank, f"group {members}")
        return self._groups.sums[members], members

    def _channel(self, sender: int, receiver: int) -> tuple[dist.ProcessGroup, int]:
        try:
            return self._groups.channels[sender, receiver]
        except KeyError:
            raise protocol.undeclared(self.rank, f"channel from {sender} to {receiver}") from None
