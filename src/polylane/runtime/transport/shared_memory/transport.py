"""Shared-memory transport for CPU workers of one host: small tensors inside messages, large ones in shared blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.transport import protocol
from polylane.runtime.transport.protocol import Deferred, FinishedTransfer, PendingResult, PendingTransfer
from polylane.runtime.transport.shared_memory import message as messages
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.message import Message
from polylane.runtime.transport.shared_memory.pending import (
    RankGroup,
    receive_from_members,
    receive_tensor,
    slice_length,
)
from polylane.runtime.transport.shared_memory.pending import part_slices as parts_of
from polylane.runtime.transport.shared_memory.reduce import ChunkedSum, DirectSum, PendingSum, TwoStepSum, sum_parts
from polylane.runtime.workers.world import World

# A key is 64 bits: 12 of the transport's number, 12 of the stream in it, 40 that count operations in steps of 2.
MESSAGES, OBJECTS, GROUPS = 0, 1, 2  # streams of one transport; from GROUPS on one for each group

IN_TURNS = 8 << 20  # bytes above which two ranks sum chunk by chunk

_OBJECT = messages.encode_description(messages.OBJECT, torch.uint8, ())
_NOTHING = torch.empty(0, dtype=torch.uint8)  # the values of a barrier's messages


class SharedMemoryTransport:
    """The workers of a world over shared memory; the interface is :class:`~.protocol.Transport`.

    Sends are complete when they return: their values have been copied. A received tensor may be in the sender's block,
    which stays this worker's as long as the tensor lives: its storage cannot be resized. Sums add up in the order of
    the ranks, the same bits at every rank. A transport is used by one thread; several threads may share a hub.

    A large sum (of two ranks above ``IN_TURNS`` bytes, of more ranks above ``INLINE``) takes several steps, which each
    rank takes in whatever wait of the hub it is: a rank that never waits again blocks the others.

    Args:
        hub: connections to the other workers of this host, of all that share a channel or a group with this one.
        world: this worker among all workers.
        channels: every (sender, receiver) pair that will be used, in the same order at every rank.
        groups: the ranks of every collective, in the same order at every rank.
    """

    def __init__(
        self, hub: MessageHub, world: World, channels: Iterable[protocol.Channel], groups: Iterable[Iterable[int]]
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.is_ordered = False
        self.counters = protocol.TransportCounters()
        self._hub = hub
        self._first_key = hub.add_user() << 52
        self._is_open = True
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        for sender, receiver in channels:
            protocol.require_channel(sender, receiver, self.size)
            if self.rank == sender:
                self._sends[receiver] = self._first_key
            elif self.rank == receiver:
                self._receives[sender] = self._first_key
        self._objects = self._first_key + (OBJECTS << 40)
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        for number, members in enumerate(dict.fromkeys(protocol.normalize_group(group, self.size) for group in groups)):
            if self.rank in members:
                peers = tuple(rank for rank in members if rank != self.rank)
                key = self._first_key + (GROUPS + number << 40)
                self._groups[members] = RankGroup(members, members.index(self.rank), peers, key)
        self._named = dict(self._groups)  # a cache: also by other orders of the same ranks

    # ----------------------------------------------------------------------------------------------- between two ranks

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        if peer not in self._sends:
            raise protocol.undeclared(self.rank, f"channel from {self.rank} to {peer}")
        if tensor.numel() == 0:
            return FinishedTransfer(tensor)
        wire = protocol.make_contiguous(tensor)
        self._sends[peer] = key = self._sends[peer] + 2
        self._post_values(messages.SEND, (peer,), key, wire, tuple(wire.shape))
        return FinishedTransfer(tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        if peer not in self._receives:
            raise protocol.undeclared(self.rank, f"channel from {peer} to {self.rank}")
        shape = tuple(shape)
        elements = math.prod(shape)
        if elements == 0:
            return FinishedTransfer(torch.empty(shape, dtype=dtype))
        self.counters.messages["receive"] += 1
        self.counters.bytes["receive"] += elements * dtype.itemsize
        self._receives[peer] = key = self._receives[peer] + 2
        return receive_tensor(self._hub, peer, key, dtype, shape)

    # ----------------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        protocol.require_summable(tensor)
        group = self._group(ranks)
        if group is None or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        several = len(group.peers) > 1
        pending: PendingSum
        if tensor.nbytes <= (messages.INLINE if several else IN_TURNS):
            pending, sent = DirectSum(self._hub, group, tensor), tensor.nbytes * len(group.peers)
        else:
            pending = (TwoStepSum if several else ChunkedSum)(self._hub, group, tensor)
            sent = protocol.all_reduce_bytes(tensor, len(group.members))
        self.counters.count_sent("all_reduce", tensor, sent, pending.start_sum())
        return pending

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        ranks, group = tuple(ranks), self._group(ranks)
        sizes = protocol.gathered_sizes(tensor, ranks.index(self.rank), ranks, sizes)
        wire = protocol.make_contiguous(tensor)
        if group is None:
            return FinishedTransfer(wire.clone())
        key = group.next_key()
        # Empty parts are not sent: every rank knows the sizes of all parts, so nobody waits for them.
        if wire.numel():
            self._post_values(messages.GATHER, group.peers, key, wire, (wire.numel(),))
        places = dict(zip(ranks, parts_of(sizes), strict=True))
        expected = {
            peer: messages.encode_description(messages.GATHER, wire.dtype, (slice_length(places[peer]),))
            for peer in group.peers
            if slice_length(places[peer])
        }

        def join(messages: dict[int, Message]) -> Tensor:
            result = torch.empty(sum(sizes), dtype=wire.dtype)
            result[places[self.rank]].copy_(wire)
            for peer, message in messages.items():
                result[places[peer]].copy_(message.as_tensor(wire.dtype))
            return result

        return receive_from_members(self._hub, group.members, key, expected, join)

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        protocol.require_summable(tensor)
        protocol.require_flat(tensor)
        ranks, group = tuple(ranks), self._group(ranks)
        sizes = protocol.part_sizes(tensor.numel(), ranks, sizes)
        places = dict(zip(ranks, parts_of(sizes), strict=True))
        wire = protocol.make_contiguous(tensor)
        if group is None:
            return FinishedTransfer(wire.clone())
        key, own_part = group.next_key(), wire[places[self.rank]]
        if wire.numel():
            self._send_parts(group, key, wire, places, sizes)
        if own_part.numel() == 0:
            return FinishedTransfer(own_part.clone())
        description = messages.encode_description(messages.SCATTER, wire.dtype, sizes)

        def total(messages: dict[int, Message]) -> Tensor:
            parts = [
                own_part if rank == self.rank else messages[rank].as_tensor(own_part.dtype) for rank in group.members
            ]
            result = torch.empty_like(own_part)
            sum_parts(parts, result)
            return result

        return receive_from_members(self._hub, group.members, key, dict.fromkeys(group.peers, description), total)

    def _send_parts(
        self, group: RankGroup, key: int, wire: Tensor, places: dict[int, slice], sizes: tuple[int, ...]
    ) -> None:
        """Send every peer its part of a vector, to be summed there."""
        hub, item = self._hub, wire.element_size()
        description = messages.encode_description(messages.SCATTER, wire.dtype, sizes)
        peer_places = {peer: places[peer] for peer in group.peers if slice_length(places[peer])}
        large = {peer: place for peer, place in peer_places.items() if slice_length(place) * item > messages.INLINE}
        headers = 0
        # Large parts share one block of this rank, each at its place in the vector; small ones go inside messages.
        with hub.lock:
            if large:
                block = hub.acquire_block(wire.nbytes, len(large))
            for peer, place in peer_places.items():
                nbytes = slice_length(place) * item
                if peer in large:
                    block.view(wire.dtype, slice_length(place), place.start).copy_(wire[place])
                    headers += hub.send_block((peer,), key, description, block, place.start * item, nbytes)
                else:
                    headers += hub.send_inline((peer,), key, description, messages.memory_of(wire[place]))
        sent = sum(slice_length(place) for place in peer_places.values()) * item
        self.counters.count_sent("reduce_scatter", wire, sent, headers)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        group = self._group(ranks)
        if group is None or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        protocol.require_source(source, group.members)
        key = group.next_key()
        shape = tuple(tensor.shape)
        if source == self.rank:
            self._post_values(messages.BROADCAST, group.peers, key, protocol.make_contiguous(tensor), shape)
            return FinishedTransfer(tensor)
        target = tensor.detach()

        def overwrite(messages: dict[int, Message]) -> Tensor:
            return target.copy_(messages[source].as_tensor(target.dtype).view(shape))

        self.counters.messages["broadcast"] += 1
        expected = {source: messages.encode_description(messages.BROADCAST, target.dtype, shape)}
        return receive_from_members(self._hub, group.members, key, expected, overwrite)

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        ranks, group = tuple(ranks), self._group(ranks)
        protocol.require_pieces(pieces, shapes, ranks)
        own_piece = pieces[ranks.index(self.rank)]
        if group is None:
            return FinishedTransfer([own_piece])
        key = group.next_key()
        for peer, piece in zip(ranks, pieces, strict=True):
            if peer != self.rank and piece.numel():
                self._post_values(messages.EXCHANGE, (peer,), key, protocol.make_contiguous(piece), tuple(piece.shape))
        parts: list[PendingTransfer] = []
        for peer, shape in zip(ranks, map(tuple, shapes), strict=True):
            if peer == self.rank:
                parts.append(FinishedTransfer(own_piece))
            elif 0 in shape:
                parts.append(FinishedTransfer(torch.empty(shape, dtype=own_piece.dtype)))
            else:
                parts.append(receive_tensor(self._hub, peer, key, own_piece.dtype, shape, messages.EXCHANGE))
        return Deferred(lambda: [part.wait() for part in parts])

    def _post_values(self, kind: int, peers: Sequence[int], key: int, wire: Tensor, shape: tuple[int, ...]) -> None:
        headers = self._hub.send_values(peers, key, messages.encode_description(kind, wire.dtype, shape), wire)
        self.counters.count_sent(messages.NAMES[kind], wire, wire.nbytes * len(peers), headers)

    # --------------------------------------------------------------------------------------------------------- objects

    def all_gather_object(self, value: Any) -> list[Any]:
        data = encode(value)
        self._send_to_others(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.counters.messages["object"] += 1
        self.counters.wire["header"] += len(data) * (self.size - 1)
        return [decode(data if rank == self.rank else self._receive_bytes(rank)) for rank in range(self.size)]

    def barrier(self) -> None:
        # An empty message to and from every other rank.
        for peer in self._send_to_others(_NOTHING):
            self._hub.receive_message(peer, self._objects, _describe_object_wait)

    def _send_to_others(self, values: Tensor) -> list[int]:
        """Send bytes to all other ranks, under the key of the next object; return these ranks."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._objects += 2
        self.counters.wire["header"] += self._hub.send_values(peers, self._objects, _OBJECT, values)
        return peers

    def _receive_bytes(self, peer: int) -> bytes | bytearray:
        message = self._hub.receive_message(peer, self._objects, _describe_object_wait)
        data = message.as_bytes()
        self._hub.release_messages(message)
        return data

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._hub.remove_user()

    def _group(self, ranks: Iterable[int]) -> RankGroup | None:
        """Return the declared group of ranks; None for this rank alone."""
        named = ranks if type(ranks) is tuple else tuple(ranks)
        if (group := self._named.get(named)) is None:
            members = protocol.normalize_group(named, self.size)
            if members == (self.rank,):
                return None
            if members not in self._groups:
                raise protocol.undeclared(self.rank, f"group {members}")
            group = self._named[named] = self._groups[members]
        return group if group.peers else None


def _describe_object_wait() -> str:
    return "exchanging objects, or waiting for all ranks"
