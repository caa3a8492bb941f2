"""Worker mesh: the axes along which a stage's operators are sharded, and their collectives over the transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from polylane.graph.sample_lists import SampleList
from polylane.placement.redistribute import Axis
from polylane.runtime.plain_data.serialization import decode, encode
from polylane.runtime.span_clock import CollectiveWaits
from polylane.runtime.transport.protocol import Transport

T = TypeVar("T")

# Up to this size two ranks all-reduce by exchanging their tensors and adding: over gloo a sum of 1 kB takes 0.2 ms that
# way and 0.4 ms as a collective, one of 512 kB 0.6 and 1.2, one of 2 MB 3.2 and 2.1.
SWAPPED_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkerMesh:
    """One worker's coordinates in its stage's mesh, and the collectives along each axis.

    Attributes:
        axes: collectives by name of the axis, in the order of the plan; empty where no operator is sharded.
        coordinates: this worker's index on each axis.
        waits: seconds and bytes that the current action spends on communication.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    waits: CollectiveWaits = field(default_factory=CollectiveWaits)

    @cached_property
    def is_first(self) -> bool:
        """Whether this worker reports what all ranks of the mesh compute alike, such as the loss."""
        return not any(self.coordinates.values())


class TransportAxis:
    """The ranks along one axis; see :class:`polylane.placement.redistribute.Axis`.

    Args:
        ranks: ranks along the axis, by their index on it.
        transport: transport with a group of these ranks.
        waits: counter of the seconds spent in collectives, and of the bytes sent.
    """

    def __init__(self, ranks: Sequence[int], transport: Transport, waits: CollectiveWaits) -> None:
        self._ranks, self._transport, self._waits = tuple(ranks), transport, waits
        self.index, self.degree = self._ranks.index(transport.rank), len(self._ranks)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        # Two addends: the sum is the same bit for bit in either order, so both ranks get the same.
        is_swapped = not self._transport.is_ordered and tensor.numel() * tensor.element_size() <= SWAPPED_BYTES
        if self.degree == 2 and is_swapped:
            pieces: list[Tensor | None] = [tensor, tensor]
            swap = self.begin_exchange(pieces, [tensor.shape] * 2)
            return lambda: torch.add(*(part for part in swap() if part is not None))
        total = tensor.clone(memory_format=torch.contiguous_format)  # the transport sums in place
        pending = self._transport.all_reduce(total, sorted(self._ranks))
        self._waits.bytes += total.nbytes
        return self._timed(pending.wait)

    def _timed(self, wait: Callable[[], T]) -> Callable[[], T]:
        def finish() -> T:
            with self._waits.timing():
                return wait()

        return finish

    def maximum(self, tensor: Tensor) -> Tensor:
        # By exchange, since the transport's all-reduce only sums.
        for peer_tensor in self.exchange([tensor] * self.degree, [tensor.shape] * self.degree):
            assert peer_tensor is not None
            tensor = torch.maximum(tensor, peer_tensor)
        return tensor

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        return self.begin_exchange(pieces, shapes)()

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        own_piece = pieces[self.index]
        assert own_piece is not None
        if isinstance(own_piece, SampleList):
            results = self._exchange_lists(pieces, shapes, own_piece)
            return lambda: results
        nothing = own_piece.new_empty(0)
        pending = self._transport.all_to_all(
            [nothing if piece is None else piece.detach() for piece in pieces],
            [(0,) if shape is None else tuple(shape) for shape in shapes],
            self._ranks,
        )
        self._waits.bytes += sum(
            piece.nbytes for i, piece in enumerate(pieces) if piece is not None and i != self.index
        )

        def finish() -> list[Tensor | None]:
            arrived = pending.wait()
            return [
                pieces[i] if i == self.index else None if shapes[i] is None else arrived[i] for i in range(self.degree)
            ]

        return self._timed(finish)

    def _exchange_lists(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None], own_piece: SampleList
    ) -> list[Tensor | None]:
        """Exchange lists of samples: their rows, then the entries as bytes, of which each rank first says how many."""
        device, sent = own_piece.device, dict[int, Tensor]()
        for piece in pieces:
            if isinstance(piece, SampleList) and id(piece) not in sent:
                sent[id(piece)] = torch.frombuffer(bytearray(encode(piece.entries)), dtype=torch.uint8).to(device)
        plain = [None if piece is None else piece.as_subclass(Tensor) for piece in pieces]
        data = [None if piece is None else sent[id(piece)] for piece in pieces]
        counts = [None if content is None else torch.tensor([content.numel()], device=device) for content in data]
        rows = self.exchange(plain, shapes)
        sizes = self.exchange(counts, [None if shape is None else (1,) for shape in shapes])
        contents = self.exchange(data, [None if size is None else (int(size),) for size in sizes])
        return [
            None
            if row is None or content is None
            else SampleList.of(decode(content.cpu().numpy().tobytes()), own_piece.kind, row)
            for row, content in zip(rows, contents, strict=True)
        ]
