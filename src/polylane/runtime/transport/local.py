"""Tensors between threads of one process: a whole world in memory, for tests and proofs that need no processes."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from polylane.errors import PeerLost
from polylane.runtime.failure import is_peer_loss
from polylane.runtime.transport.protocol import Counters, Done, Pending, as_sent, normalised, require_summable

T = TypeVar("T")

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


class _Waiting:
    """A transfer between threads: what remains to be done is done in the wait."""

    __slots__ = ("_finish", "_tensor")

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """See :meth:`.protocol.Pending.wait`."""
        if self._tensor is None:
            self._tensor = self._finish()
        return self._tensor


class LocalTransport:
    """One thread's end of a world in memory; the interface is :class:`~.protocol.Transport`.

    Stricter than the wire, so that tests see what gloo would abort for: a receive checks shape and dtype, and a wait
    that nobody can end raises. Sums add up in the order of the ranks, the same bits at every rank and every time.
    """

    def __init__(self, rank: int, hub: _Hub) -> None:
        self.rank = rank
        self.size = hub.size
        self.counters = Counters()
        self._hub = hub
        self._asked: Counter[Key] = Counter()

    def send(self, tensor: Tensor, peer: int) -> Pending:
        """See :meth:`.protocol.Transport.send`."""
        self._require_peer(peer)
        if tensor.numel() == 0:
            return Done(tensor)
        self.counters.add("send", tensor)
        self._hub.put(self._next("message", self.rank, peer), self.rank, as_sent(tensor).clone())
        return Done(tensor)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Pending:
        """See :meth:`.protocol.Transport.receive`. Its wait raises ValueError where another shape or dtype was sent."""
        self._require_peer(peer)
        expected = torch.empty(tuple(shape), dtype=dtype, device="meta")
        if expected.numel() == 0:
            return Done(torch.empty(tuple(shape), dtype=dtype))
        self.counters.add("receive", expected)
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

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> Pending:
        """See :meth:`.protocol.Transport.all_reduce`."""
        require_summable(tensor)
        members = normalised(ranks, self.size)
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not in the group {members}")
        if len(members) == 1 or tensor.numel() == 0:
            return Done(tensor)
        self.counters.add("all_reduce", tensor)
        key = self._next("sum", members)
        self._hub.put(key, self.rank, as_sent(tensor).clone())

        def finish() -> Tensor:
            parts = self._hub.take(key, members, len(members), f"rank {self.rank} was summing over ranks {members}")
            if len({(part.shape, part.dtype) for part in parts}) > 1:
                raise ValueError(f"ranks {members} gave tensors of {[tuple(part.shape) for part in parts]} to one sum")
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            tensor.detach().copy_(total)
            return tensor.detach()

        return _Waiting(finish)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`.protocol.Transport.all_gather_object`."""
        return self._exchange(value, range(self.size))

    def gather_object(self, value: Any, destination: int) -> list[Any] | None:
        """See :meth:`.protocol.Transport.gather_object`."""
        values = self._exchange(value, range(self.size))
        return values if self.rank == destination else None

    def broadcast_object(self, value: Any, source: int) -> Any:
        """See :meth:`.protocol.Transport.broadcast_object`."""
        return self._exchange(value, [source])[0]

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

    def _exchange(self, value: Any, sources: Sequence[int]) -> list[Any]:
        """The sources' values at every rank, copied as they would be by the wire."""
        self.counters.add("object")
        key = self._next("object")
        if self.rank in sources:
            self._hub.put(key, self.rank, pickle.dumps(value))
        taken = self._hub.take(key, sources, self.size, f"rank {self.rank} was exchanging objects")
        return [pickle.loads(data) for data in taken]

    def _next(self, *what: Any) -> Key:
        """A key that both ends count in step."""
        self._asked[what] += 1
        return (*what, self._asked[what])

    def _require_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise ValueError(f"rank {self.rank} has no peer {peer} among {self.size} workers")


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
    if errors:
        raise next((error for error in errors if not is_peer_loss(error)), errors[0])
    return [results[rank] for rank in range(size)]
