"""Watched transport: a transport whose operations are counted on the worker's page, and whose waits are seen there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from polylane.diagnosis.page_layout import COUNTERS_WORD, WAIT_WORD, pack_wait
from polylane.errors import PeerLost
from polylane.runtime.progress_page import Progress
from polylane.runtime.transport.protocol import OperationsDiffer, PendingResult, PendingTransfer, Transport
from polylane.runtime.workers.world import World

T = TypeVar("T")


def watch_transports(connect: Callable[..., Transport], progress: Progress) -> Callable[..., Transport]:
    """Return a constructor of transports that are watched; the same one where nobody watches."""
    if not progress.is_watched:
        return connect

    def connect_watched(
        world: World, pairs: Iterable[tuple[int, int]], groups: Iterable[Iterable[int]] = (), **options: Any
    ) -> Transport:
        channels, members = list(pairs), [tuple(group) for group in groups]
        progress.device = world.accelerator
        transport = connect(world, channels, members, **options)
        return WatchedTransport(transport, progress, options.get("tag", 0), channels, members)

    return connect_watched


class WatchedTransport:
    """A transport whose operations and waits are written on the page; see :class:`.protocol.Transport`.

    Args:
        transport: the transport that carries everything.
        progress: the page of this worker.
        tag: number of the transport, the same at all its ranks.
        pairs: directed channels (sender, receiver).
        groups: ranks that take part in collectives.
    """

    def __init__(
        self,
        transport: Transport,
        progress: Progress,
        tag: int,
        pairs: Sequence[tuple[int, int]],
        groups: Sequence[tuple[int, ...]],
    ) -> None:
        self._transport, self._progress, self._tag, self._words = transport, progress, tag, progress.words
        self.rank, self.size, self.counters = transport.rank, transport.size, transport.counters
        self.is_ordered = transport.is_ordered
        everyone = tuple(range(self.size))
        names = {channel_name(tag, *pair): tuple(sorted(pair)) for pair in pairs}
        for group in (*groups, everyone):
            members = tuple(sorted(set(group)))
            names[group_name(tag, members)] = members
        self._lines = open_lines(progress, self.rank, names.items())
        self._everyone = self._lines.get(group_name(tag, everyone))
        sends = ((peer, self._lines.get(channel_name(tag, self.rank, peer))) for peer in everyone)
        receives = ((peer, self._lines.get(channel_name(tag, peer, self.rank))) for peer in everyone)
        self._sends, self._receives = dict(sends), dict(receives)
        self._groups: dict[Iterable[int], int | None] = {}

    def _line_of(self, ranks: Iterable[int]) -> int | None:
        key = ranks if isinstance(ranks, (tuple, range)) else tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._lines.get(group_name(self._tag, sorted(set(key))))
        return self._groups[key]

    def _watch(self, line: int | None, begin: Callable[..., PendingResult[T]], *arguments: Any) -> PendingResult[T]:
        """Begin an operation, as :meth:`.page.Progress.begin_wait` says but without its calls: there are many."""
        if line is None:
            return begin(*arguments)
        words, counter = self._words, COUNTERS_WORD + line
        words[counter] = number = words[counter] + 1
        # Also until it is under way: a sender waits there for others to read what it sent before.
        words[WAIT_WORD] = word = pack_wait(line, number)
        try:
            pending = begin(*arguments)
        except (PeerLost, OperationsDiffer) as error:
            raise self._progress.explain(error) from error
        words[WAIT_WORD] = 0
        return _WatchedTransfer(pending, self._progress, words, word, self.is_ordered)

    def send(self, tensor: Tensor, peer: int) -> PendingTransfer:
        return self._watch(self._sends.get(peer), self._transport.send, tensor, peer)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> PendingTransfer:
        return self._watch(self._receives.get(peer), self._transport.receive, shape, dtype, peer)

    def all_reduce(self, tensor: Tensor, ranks: Iterable[int]) -> PendingTransfer:
        ranks = ranks if isinstance(ranks, (tuple, range)) else tuple(ranks)
        return self._watch(self._line_of(ranks), self._transport.all_reduce, tensor, ranks)

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> PendingTransfer:
        return self._watch(self._line_of(ranks), self._transport.all_gather, tensor, ranks, sizes)

    def reduce_scatter(
        self, tensor: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None
    ) -> PendingTransfer:
        return self._watch(self._line_of(ranks), self._transport.reduce_scatter, tensor, ranks, sizes)

    def broadcast(self, tensor: Tensor, source: int, ranks: Iterable[int]) -> PendingTransfer:
        ranks = ranks if isinstance(ranks, (tuple, range)) else tuple(ranks)
        return self._watch(self._line_of(ranks), self._transport.broadcast, tensor, source, ranks)

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> PendingResult[list[Tensor]]:
        return self._watch(self._line_of(ranks), self._transport.all_to_all, pieces, shapes, ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._call(lambda: self._transport.all_gather_object(value))

    def barrier(self) -> None:
        self._call(self._transport.barrier)

    def _call(self, call: Callable[[], T]) -> T:
        """Call what all ranks take part in, and what returns once they have."""
        if self._everyone is None:
            return call()
        self._progress.begin_wait(self._everyone, self._progress.begin_operation(self._everyone))
        try:
            result = call()
        except (PeerLost, OperationsDiffer) as error:
            raise self._progress.explain(error) from error
        self._progress.end_wait()
        return result

    def close(self) -> None:
        self._transport.close()


class _WatchedTransfer(Generic[T]):
    """A pending operation whose wait is seen."""

    __slots__ = ("_handle", "_pending", "_progress", "_word", "_words")

    def __init__(
        self, pending: PendingResult[T], progress: Progress, words: memoryview, word: int, is_ordered: bool
    ) -> None:
        self._pending, self._progress, self._words, self._word = pending, progress, words, word
        # Of an accelerator's operation the wait is its stream's, and ends at once.
        self._handle = getattr(pending, "handle", None) if is_ordered else None

    def wait(self) -> T:
        self._words[WAIT_WORD] = self._word
        try:
            result = self._pending.wait()
        except (PeerLost, OperationsDiffer) as error:
            raise self._progress.explain(error) from error
        self._words[WAIT_WORD] = 0
        if self._handle is not None:
            self._progress.follow_device(self._word, self._handle)
            self._handle = None
        return result


def group_name(tag: int, ranks: Iterable[int]) -> str:
    """Return the name of the line of a group's collectives on the transport with a tag."""
    return f"{tag}: {', '.join(map(str, ranks))}"


def channel_name(tag: int, sender: int, receiver: int) -> str:
    """Return the name of the line of messages from one rank to another on the transport with a tag."""
    return f"{tag}: {sender} > {receiver}"


def open_lines(progress: Progress, rank: int, names: Iterable[tuple[str, Sequence[int]]]) -> dict[Any, int]:
    """Note the lines that a rank is a member of; return their numbers by name."""
    numbers = {name: progress.add_line(name, ranks) for name, ranks in names if rank in ranks}
    return {name: number for name, number in numbers.items() if number is not None}
