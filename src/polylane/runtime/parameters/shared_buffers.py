"""Buffers that several pipeline stages use: tracks which stage has the current value, and broadcasts it when needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polylane.graph.partition import Partition
from polylane.runtime.parameters.broadcast import broadcast_from_owner
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.transport.protocol import Transport


@dataclass
class SharedBuffers:
    """Tracks the stages that have the current value of every buffer, and broadcasts it before another stage reads it.

    Within one graph a buffer that is written is on one stage. Another graph of the same model (a GAN's other loss, say,
    which runs its generator first instead of last; or evaluation) may have it on another stage.

    Attributes:
        stage: index of this worker's pipeline stage.
        stages: number of pipeline stages of the plan.
        column: ranks that take part in a broadcast: one of each stage, all with the same shards, or all ranks.
        speaks: whether this worker is the one of its stage that contributes values to the broadcast.
        tensors: returns this worker's buffers, by name.
        device: device of the tensors that the transport carries.
        transport: connects all training workers; ``column`` is one of its groups.
        pieces: shards of this worker, where ranks of the column hold different ones; else None.
    """

    stage: int
    stages: int
    column: Sequence[int]
    speaks: bool
    tensors: Callable[[], Mapping[str, Tensor]]
    device: torch.device
    transport: Transport
    pieces: ShardSpec | None = None
    # By buffer, the stages that have its current value; no entry: all of them, as before the first step.
    _current_stages: dict[str, frozenset[int]] = field(default_factory=dict)

    def receive_updates(self, used: Mapping[str, Collection[int]]) -> None:
        """Bring the buffers of a graph up to date on every stage that uses them; a collective of all workers.

        Called before the graph runs.

        Args:
            used: the stages that read or write each buffer of the graph, by its name (:func:`stages_of_buffers`).
        """
        for name, stages in used.items():
            current = self._current_stages.get(name)
            if current is not None and not current.issuperset(stages):
                # All workers track the same stages, so all find here alike that a broadcast is due.
                tensor = self.tensors()[name]
                owns = self.speaks and self.stage == min(current)
                with torch.no_grad():
                    tensor.copy_(self._broadcast_buffer(name, tensor.to(self.device), owns))
                self._current_stages[name] = frozenset(range(self.stages))

    def mark_updated(self, used: Mapping[str, frozenset[int]]) -> None:
        """Record that a graph ran in training: only the stages that used a buffer have its new value."""
        if self.stages > 1:
            self._current_stages |= used

    def mark_restored(self, used: Mapping[str, frozenset[int]]) -> None:
        """Record that a checkpoint was loaded: the stages that use a buffer have its value, and all that of others."""
        self._current_stages = dict(used) if self.stages > 1 else {}

    def _broadcast_buffer(self, name: str, buffer: Tensor, owns: bool) -> Tensor:
        if self.pieces is None:
            return broadcast_from_owner(buffer, owns, self.transport, self.column)
        # Ranks of other stages may cut the buffer otherwise: sum the full value, and let each cut its own shard.
        part = self.pieces.full_summand(name, buffer if owns else None, buffer)
        full_buffer = broadcast_from_owner(part, True, self.transport, self.column)
        return self.pieces.local_shard(name, full_buffer)

    def owning_stage(self, name: str, among: Collection[int]) -> int:
        """Return the lowest stage that has a buffer's current value.

        Args:
            name: canonical name of the buffer.
            among: the stages that use it: before the first step each has its value, and others need not.
        """
        current = self._current_stages.get(name, frozenset(among))
        return min(current.intersection(among) or current)


def stages_of_buffers(partition: Partition) -> dict[str, frozenset[int]]:
    """Return the stages that read or write each buffer, by its name, in the same order on every worker."""
    used: dict[str, set[int]] = {}
    for stage in range(partition.stages):
        for name in partition.buffers(stage):
            used.setdefault(name, set()).add(stage)
    return {name: frozenset(stages) for name, stages in used.items()}
