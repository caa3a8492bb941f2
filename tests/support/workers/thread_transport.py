"""Tensors between threads of one process: a whole world in memory, for tests that need no processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.graph.python_state.ended_threads import wait_gone
from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.transport.protocol import (
    FinishedTransfer,
    PendingResult,
    PendingTransfer,
    TransportCounters,
    all_reduce_bytes,
    gathered_sizes,
    make_contiguous,
    normalize_group,
    part_sizes,
    require_flat,
    require_summable,
)
from polylane.runtime.workers.failure import is_peer_loss

T = TypeVar("T")
R = TypeVar("R")

Key = tuple[Any, ...]  # what is exchanged, by whom, and for the how-manieth time

TIMEOUT_SECONDS = 60.0  # a wait that takes longer is a deadlock


class _Hub:
    """What all threads of one world share: values put under a key by their ranks, and who has left or failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._values: dict[Key, dict[int, Any]] = {}
        self._taken: Counter[Key] = Counter()
        self._gone: set[int] = set()
        self._failed: tuple[int, BaseException] | None = None

    def put(self, key: Key, rank: int, value: Any) -> None:
        with self._changed:
            self._values.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def take(self, key: Key, sources: Sequence[int], takers: int, doing: str) -> list[Any]:
        """The values of all sources; the last of the takers clears them away.

        Raises:
            PeerLost: a source left without giving its value, any worker failed, or nothing came in time.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with self._changed:
            while missing := [rank for rank in sources if rank not in self._values.get(key, {})]:
                if self._failed is not None:
                    raise PeerLost(self._failed[0], doing, f"it failed: {self._failed[1]!r}")
                if gone := self._gone.intersection(missing):
                    raise PeerLost(min(gone), doing, "it has left")
                if time.monotonic() > deadline:
                    raise PeerLost(missing[0], doing, f"no answer in {TIMEOUT_SECONDS:.0f} s")
                self._changed.wait(deadline - time.monotonic())
            values = [self._values[key][rank] for rank in sources]
            self._taken[key] += 1
            if self._taken[key] == takers:
                del self._taken[key], self._values[key]
            return values

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        with self._changed:
            self._failed = self._failed or (rank, error)
            self._changed.notify_all()


class _Waiting(Generic[R]):
    """A transfer between threads: what remains to be done is done in the wait."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Callable[[], R]) -> None:
        self._finish = finish
        self._result: R | None = None

    def wait(self) -> R:
        """See :meth:`.protocol.Outcome.wait`."""
        if self._result is None:
            self._result = self._finish()
        return self._result


class LocalTransport:
    """One thread's end of a world in memory; the interface is :class:`~.protocol.Transport`.

    Stricter than the wire, so that tests see what gloo would abort for: a receive checks shape and dtype, and a wait
    that nobody can end raises. Sums add up in the order of the ranks, the same bits at every rank and every time.
    """

    def __init__(self, rank: int, hub: _Hub) -> None:
        self.rank = rank
        self.size = hub.size
        self.is_ordered = False
        self.counters = TransportCounters()
        self._hub = hub
        self._asked: Counter[Key] = Counter()

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        """See :meth:`.protocol.Transport.send`."""
        self._require_peer(peer)
        if tensor.numel() == 0:
            return FinishedTransfer(tensor)
        self.counters.count_sent("send", tensor, tensor.nbytes)
        self._hub.put(self._next("message", self.rank, peer), self.rank, make_contiguous(tensor).clone())
        return FinishedTransfer(tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        """See :meth:`.protocol.Transport.receive`. Its wait raises ValueError where another shape or dtype was sent."""
        self._require_peer(peer)
        expected = torch.empty(tuple(shape), dtype=dtype, device="meta")
        if expected.numel() == 0:
            return FinishedTransfer(torch.empty(tuple(shape), dtype=dtype))
        self.counters.count_local("receive", expected)
        key = self._next("message", peer, self.rank)

        def finish() -> Tensor:
            tensor: Tensor
            (tensor,) = self._hub.take(key, [peer], 1, f"rank {self.rank} was receiving {dtype} {tuple(shape)}")
            if (tensor.shape, tensor.dtype) != (expected.shape, dtype):
                raise ValueError(
                    f"rank {peer} sent {tensor.dtype} {tuple(tensor.shape)}, "
                    f"rank {self.rank} expected {dtype} {tuple(shape)}"
                )
            return tensor

        return _Waiting(finish)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        """See :meth:`.protocol.Transport.all_reduce`."""
        require_summable(tensor)
        members = self._members(ranks)
        if len(members) == 1 or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        self.counters.count_sent("all_reduce", tensor, all_reduce_bytes(tensor, len(members)))

        def finish(parts: list[Tensor]) -> Tensor:
            if len({(part.shape, part.dtype) for part in parts}) > 1:
                raise ValueError(f"ranks {members} gave tensors of {[tuple(part.shape) for part in parts]} to one sum")
            tensor.detach().copy_(_total(parts))
            return tensor.detach()

        return self._collective(
            "sum", members, make_contiguous(tensor).clone(), f"summing over ranks {members}", finish
        )

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        """See :meth:`.protocol.Transport.all_gather`. Its wait raises ValueError where lengths or dtypes differ."""
        members, ranks = self._members(ranks), tuple(ranks)
        sizes = gathered_sizes(tensor, ranks.index(self.rank), ranks, sizes)
        own = make_contiguous(tensor).clone()
        if len(members) == 1:
            return FinishedTransfer(own)
        self.counters.count_sent("all_gather", own, own.nbytes * (len(members) - 1))
        expected = [(own.dtype, (size,)) for size in sizes]

        def finish(parts: list[Tensor]) -> Tensor:
            ordered = [parts[members.index(rank)] for rank in ranks]
            self._require(ordered, expected, ranks)
            return torch.cat(ordered)

        return self._collective("gather", members, own, f"gathering from ranks {members}", finish)

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        """See :meth:`.protocol.Transport.reduce_scatter`. Its wait raises ValueError where lengths or dtypes differ."""
        require_summable(tensor)
        require_flat(tensor)
        members, ranks = self._members(ranks), tuple(ranks)
        sizes = part_sizes(tensor.numel(), ranks, sizes)
        if len(members) == 1:
            return FinishedTransfer(make_contiguous(tensor).clone())
        index = ranks.index(self.rank)
        start, size = sum(sizes[:index]), sizes[index]
        self.counters.count_sent("reduce_scatter", tensor, (tensor.numel() - size) * tensor.element_size())
        wire = make_contiguous(tensor).clone()

        def finish(parts: list[Tensor]) -> Tensor:
            self._require(parts, [(wire.dtype, tuple(wire.shape))] * len(parts), members)
            return _total([part[start : start + size] for part in parts])

        return self._collective("scatter", members, wire, f"summing parts over ranks {members}", finish)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        """See :meth:`.protocol.Transport.broadcast`. Its wait raises ValueError where shapes or dtypes differ."""
        members = self._members(ranks)
        if source not in members:
            raise ValueError(f"rank {source} cannot be the source for ranks {members}: it is none of them")
        if len(members) == 1 or tensor.numel() == 0:
            return FinishedTransfer(tensor)
        given = None
        if self.rank == source:
            given = make_contiguous(tensor).clone()
            self.counters.count_sent("broadcast", given, given.nbytes * (len(members) - 1))
        else:
            self.counters.messages["broadcast"] += 1

        def finish(parts: list[Any]) -> Tensor:
            part = parts[members.index(source)]
            self._require([part], [(tensor.dtype, tuple(tensor.shape))], [source])
            return tensor.detach().copy_(part)

        return self._collective("broadcast", members, given, f"broadcasting from rank {source}", finish)

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        """See :meth:`.protocol.Transport.all_to_all`. Its wait raises ValueError where shapes or dtypes differ."""
        members, ranks = self._members(ranks), tuple(ranks)
        if not len(pieces) == len(shapes) == len(ranks):
            raise ValueError(f"{len(pieces)} pieces and {len(shapes)} shapes for the {len(ranks)} ranks {ranks}")
        own = pieces[ranks.index(self.rank)]
        given = {rank: make_contiguous(piece).clone() for rank, piece in zip(ranks, pieces, strict=True)}
        for rank, piece in given.items():
            if rank != self.rank and piece.numel():
                self.counters.count_sent("all_to_all", piece, piece.nbytes)

        def finish(parts: list[dict[int, Tensor]]) -> list[Tensor]:
            found = [own if rank == self.rank else parts[members.index(rank)][self.rank] for rank in ranks]
            expected = [
                (own.dtype, tuple(own.shape if r == self.rank else s)) for r, s in zip(ranks, shapes, strict=True)
            ]
            self._require(found, expected, ranks)
            return found

        return self._collective("exchange", members, given, f"exchanging pieces among ranks {members}", finish)

    def _members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        members = normalize_group(ranks, self.size)
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not in the group {members}")
        return members

    def _collective(
        self, kind: str, members: tuple[int, ...], given: Any, doing: str, finish: Callable[[list[Any]], R]
    ) -> _Waiting[R]:
        """Give what the others of a group take, and make of what they give a result."""
        key = self._next(kind, members)
        self._hub.put(key, self.rank, given)
        return _Waiting(lambda: finish(self._hub.take(key, members, len(members), f"rank {self.rank} was {doing}")))

    def _require(
        self, parts: Sequence[Tensor], expected: Sequence[tuple[torch.dtype, tuple[int, ...]]], ranks: Sequence[int]
    ) -> None:
        for part, (dtype, shape), rank in zip(parts, expected, ranks, strict=True):
            if (part.dtype, tuple(part.shape)) != (dtype, shape):
                raise ValueError(
                    f"rank {rank} gave {part.dtype} {tuple(part.shape)}, rank {self.rank} expected {dtype} {shape}"
                )

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`.protocol.Transport.all_gather_object`."""
        self.counters.count_local("object")
        key = self._next("object")
        self._hub.put(key, self.rank, encode(value))
        taken = self._hub.take(key, range(self.size), self.size, f"rank {self.rank} was exchanging objects")
        return [decode(data) for data in taken]  # copied as they would be by the wire

    def barrier(self) -> None:
        """See :meth:`.protocol.Transport.barrier`."""
        key = self._next("barrier")
        self._hub.put(key, self.rank, None)
        self._hub.take(key, range(self.size), self.size, f"rank {self.rank} was waiting for all ranks")

    def close(self) -> None:
        """Leave: who waits for this rank from now on raises. What it has sent can still be received."""
        self._hub.leave(self.rank)

    def abort(self, error: BaseException) -> None:
        """Tell all ranks that this one failed: their waits raise PeerLost."""
        self._hub.fail(self.rank, error)

    def _next(self, *what: Any) -> Key:
        """A key that both ends count in step."""
        self._asked[what] += 1
        return (*what, self._asked[what])

    def _require_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise ValueError(f"rank {self.rank} has no peer {peer} among {self.size} workers")


def _total(parts: Sequence[Tensor]) -> Tensor:
    """The sum, added up in order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def local_world(size: int) -> list[LocalTransport]:
    """The ends of a world of threads, by rank; each is to be used by one thread."""
    hub = _Hub(size)
    return [LocalTransport(rank, hub) for rank in range(size)]


def run_local(size: int, worker: Callable[[LocalTransport], T]) -> list[T]:
    """Run a worker in as many threads; return their results by rank.

    Torch's random number generator is one for all threads: workers that draw need generators of their own.

    Raises:
        BaseException: the first error of a worker that is not the echo of another one's, as it was raised.
    """
    world = local_world(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = worker(transport)
        except BaseException as error:  # whatever it is, the others must not wait for this thread
            errors.append(error)
            transport.abort(error)
        finally:
            transport.close()

    threads = [threading.Thread(target=run, args=(transport,), daemon=True) for transport in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_gone(thread.native_id for thread in threads)
    if errors:
        raise next((error for error in errors if not is_peer_loss(error)), errors[0])
    return [results[rank] for rank in range(size)]
