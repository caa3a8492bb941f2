"""Buffers that several stages use in turn: one objective, then another; training, then evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from polylane.graph.partition import Partition
from polylane.runtime.parameters.broadcast import broadcast_from_owner
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.transport.protocol import Transport


class SharedBuffers:
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
        pieces: ShardSpec | None = None,
    ) -> None:
        self._stage, self._stages = stage, stages
        self._column, self._is_source = tuple(column), speaks
        self._shard_spec = pieces
        self._tensors = tensors
        self._device = device
        self._transport = transport
        self._current_stages: dict[
            str, frozenset[int]
        ] = {}  # the stages that have it; all of them, until the first step

    def receive_updates(self, used: Mapping[str, Collection[int]]) -> None:
        """Before a graph runs: every stage gets the buffers that it uses. All workers must call it.

        Args:
            used: of each buffer that the graph reads or writes, the stages that do; see :func:`stages_of_buffers`.
        """
        for name, stages in used.items():
            current = self._current_stages.get(name)
            if current is not None and not current.issuperset(stages):
                tensor = self._tensors()[name]
                owns = self._is_source and self._stage == min(current)
                with torch.no_grad():
                    tensor.copy_(self._broadcast_buffer(name, tensor.to(self._device), owns))
                self._current_stages[name] = frozenset(range(self._stages))

    def mark_updated(self, used: Mapping[str, frozenset[int]]) -> None:
        """After a graph has run in training: only the stages that used a buffer have its new value."""
        if self._stages > 1:
            self._current_stages |= used

    def _broadcast_buffer(self, name: str, own: Tensor, owns: bool) -> Tensor:
        if self._shard_spec is None:
            return broadcast_from_owner(own, owns, self._transport, self._column)
        part = self._shard_spec.full_summand(name, own if owns else None, own)
        whole = broadcast_from_owner(part, True, self._transport, self._column)
        return self._shard_spec.local_shard(name, whole)

    def owning_stage(self, name: str) -> int:
        """A stage that has the current value."""
        return min(self._current_stages.get(name, {0}))


def stages_of_buffers(partition: Partition) -> dict[str, frozenset[int]]:
    """The stages that read or write a buffer, by its name, in the same order on every worker."""
    used: dict[str, set[int]] = {}
    for stage in range(partition.stages):
        for name in partition.buffers(stage):
            used.setdefault(name, set()).add(stage)
    return {name: frozenset(stages) for name, stages in used.items()}
