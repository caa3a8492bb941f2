"""Buffers that several stages use in turn: one objective, then another; training, then evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from polylane.graph.partition import Partition
from polylane.runtime.pieces import Pieces
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.weights import shared


class Buffers:
    """Knows which stages have the current value of every buffer, and brings it to where it is needed next.

    Within one graph a buffer that is written lives on one stage. Another graph of the same model (a GAN's other loss,
    say, which runs its generator first and not last) may have it on another one.

    Args:
        stage: this worker's.
        stages: how many there are.
        column: the ranks among which buffers are handed on: one of each stage, all with the same parts, or all ranks.
        speaks: whether this worker has the values of its stage that count.
        tensors: this worker's buffers, by name.
        device: of tensors that the transport carries.
        transport: between the workers; ``column`` is one of its groups.
        pieces: puts together what is handed on, where ranks of the column hold different parts; else None.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        column: Sequence[int],
        speaks: bool,
        tensors: Callable[[], Mapping[str, Tensor]],
        device: torch.device,
        transport: Transport,
        pieces: Pieces | None = None,
    ) -> None:
        self._stage, self._stages = stage, stages
        self._column, self._speaks = tuple(column), speaks
        self._pieces = pieces
        self._tensors = tensors
        self._device = device
        self._transport = transport
        self._current: dict[str, set[int]] = {}  # the stages that have it; all of them, until the first step
        self._uses: dict[int, tuple[Partition, dict[str, set[int]]]] = {}  # by the partition's identity

    def fetch(self, partition: Partition) -> None:
        """Before a graph runs: every stage gets the buffers that it uses. All workers must call it."""
        for name, stages in self._used(partition).items():
            current = self._current.get(name)
            if current is not None and not stages <= current:
                tensor = self._tensors()[name]
                owns = self._speaks and self._stage == min(current)
                with torch.no_grad():
                    tensor.copy_(self._handed_on(name, tensor.to(self._device), owns))
                self._current[name] = set(range(self._stages))

    def written(self, partition: Partition) -> None:
        """After a graph has run in training: only the stages that used a buffer have its new value."""
        if self._stages > 1:
            self._current |= self._used(partition)

    def _handed_on(self, name: str, own: Tensor, owns: bool) -> Tensor:
        if self._pieces is None:
            return shared(own, owns, self._transport, self._column)
        part = self._pieces.whole(name, own if owns else None, own)
        whole = shared(part, True, self._transport, self._column)
        return self._pieces.local_shard(name, whole)

    def owner(self, name: str) -> int:
        """A stage that has the current value."""
        return min(self._current.get(name, {0}))

    def _used(self, partition: Partition) -> dict[str, set[int]]:
        """The stages that read or write a buffer, by its name, in the same order on every worker."""
        if id(partition) not in self._uses:
            used: dict[str, set[int]] = {}
            for stage in range(partition.stages):
                for name in partition.buffers(stage):
                    used.setdefault(name, set()).add(stage)
            self._uses[id(partition)] = partition, used
        return self._uses[id(partition)][1]
