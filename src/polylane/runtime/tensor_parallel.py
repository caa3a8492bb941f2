"""Mesh: the axes along which a stage's operators are split, as one worker sees them, over the transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from polylane.placement.redistribute import Axis
from polylane.runtime.transport.protocol import Transport

T = TypeVar("T")

# Up to so many bytes two ranks swap what they have and add: over gloo a sum of 1 kB takes 0.2 ms so and 0.4 ms as a
# collective, one of 512 kB 0.6 and 1.2, one of 2 MB 3.2 and 2.1.
SWAPPED_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkerMesh:
    """Where a worker is, and whom it reaches.

    Attributes:
        axes: by name, in the order of the plan; empty where no operator is split.
        coordinates: this worker's index on each.
        waits: what the action under way spends on communication.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    waits: CollectiveWaits = field(default_factory=lambda: CollectiveWaits())

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for all that compute the same whole values."""
        return not any(self.coordinates.values())


@dataclass
class CollectiveWaits:
    """What an action spends on communication: seconds in the collectives inside it, which are not work, and bytes that
    are handed to the transport, or got from it."""

    seconds: float = 0.0
    bytes: int = 0


class TransportAxis:
    """The ranks along one axis; see :class:`polylane.placement.redistribute.Axis`.

    Args:
        ranks: of the axis, in order.
        transport: with a channel between each two of them, and a group of all.
        waits: counts the seconds spent in collectives, and the bytes sent.
    """

    def __init__(self, ranks: Sequence[int], transport: Transport, waits: CollectiveWaits) -> None:
        self._ranks, self._transport, self._waits = tuple(ranks), transport, waits
        self.index, self.degree = self._ranks.index(transport.rank), len(self._ranks)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """The sum over all ranks, to be waited for."""
        if self.degree == 2 and tensor.numel() * tensor.element_size() <= SWAPPED_BYTES:
            pieces: list[Tensor | None] = [tensor, tensor]
            swap = self.begin_exchange(pieces, [tensor.shape] * 2)
            return lambda: torch.add(*(part for part in swap() if part is not None))
        own = tensor.clone(memory_format=torch.contiguous_format)
        pending = self._transport.all_reduce(own, sorted(self._ranks))
        self._waits.bytes += own.nbytes
        return self._timed(pending.wait)

    def _timed(self, wait: Callable[[], T]) -> Callable[[], T]:
        def finish() -> T:
            start = time.perf_counter()
            result = wait()
            self._waits.seconds += time.perf_counter() - start
            return result

        return finish

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over all ranks."""
        for other in self.exchange([tensor] * self.degree, [tensor.shape] * self.degree):
            assert other is not None
            tensor = torch.maximum(tensor, other)
        return tensor

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """Send a piece to each rank and receive one from each."""
        return self.begin_exchange(pieces, shapes)()

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        """Send a piece to each rank and receive one from each, to be waited for."""
        own = pieces[self.index]
        assert own is not None
        dtype = own.dtype
        receives = [
            None if shape is None or i == self.index else self._transport.receive(tuple(shape), dtype, self._ranks[i])
            for i, shape in enumerate(shapes)
        ]
        leaving = [(i, piece) for i, piece in enumerate(pieces) if piece is not None and i != self.index]
        sends = [self._transport.send(piece.detach(), self._ranks[i]) for i, piece in leaving]
        self._waits.bytes += sum(piece.nbytes for _, piece in leaving)

        def finish() -> list[Tensor | None]:
            result = [
                pieces[i] if i == self.index else None if pending is None else pending.wait()
                for i, pending in enumerate(receives)
            ]
            for pending in sends:
                pending.wait()
            return result

        return self._timed(finish)
