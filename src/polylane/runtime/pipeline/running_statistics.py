"""Running statistics of replicas in turn: moved microbatch by microbatch, in the order of one device.

Each replica normalizes whole microbatches, but not all of them, and moves of an average do not commute. Statistics of
all microbatches are therefore summed over the replicas behind the last pass (each adds those that it has), and every
replica makes all moves in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.graph.operators.sync_batch_norm import move_statistics
from polylane.program.program import Program
from polylane.samples.running_norms import RunningNorm, find_running_norms


class Kept(list[tuple[Tensor, Tensor]]):
    """Statistics of one microbatch on this worker: (mean, unbiased variance) of every batch normalization."""

    def keep(self, mean: Tensor, variance: Tensor) -> None:
        """Keep those of the next normalization."""
        self.append((mean, variance))


@dataclass(frozen=True)
class RunningStatistics:
    """The running statistics of one worker's batch normalizations.

    Attributes:
        norms: the normalizations, in the order of their calls.
        counters: by name of a buffer that counts passes, what each pass adds to it.
    """

    norms: Sequence[RunningNorm]
    counters: Mapping[str, int]

    @classmethod
    def of_program(cls, program: Program) -> RunningStatistics | None:
        """Return those of a worker's stages; None where no other replica has a part in them.

        Raises:
            PolylaneError: the user's own Python normalizes.
        """
        if not program.takes_turns or len(program.replicas) == 1:
            return None
        names = {node.name for stage in program.stages for node in program.partition.nodes(stage)}
        norms, counters = find_running_norms(program.partition.graph.code.fx, names)
        return cls(norms, counters) if norms else None

    @torch.no_grad()
    def move(
        self,
        tensors: Mapping[tuple[str, Any], Tensor],
        statistics: Mapping[int, Kept],
        microbatches: int,
        sum_replicas: Callable[[Tensor], Tensor],
    ) -> None:
        """Move the running statistics for all microbatches of a batch; collective over the replicas.

        Args:
            tensors: this worker's tensors by role, with its shards of the buffers.
            statistics: by microbatch of this replica, the statistics of its normalizations.
            microbatches: number of microbatches that have samples, over all replicas; these are the first ones.
            sum_replicas: sums a tensor over the replicas, in place.
        """
        buffers = [tensors["buffer", name] for norm in self.norms for name in (norm.mean, norm.variance)]
        sizes = [buffer.numel() for buffer in buffers]
        # Float64 loses nothing of any dtype that statistics are kept in.
        rows = torch.zeros(microbatches, sum(sizes), dtype=torch.float64, device=buffers[0].device)
        for microbatch, pairs in statistics.items():
            rows[microbatch] = torch.cat([tensor.flatten().double() for pair in pairs for tensor in pair])
        rows = sum_replicas(rows.flatten()).view_as(rows)
        momenta = [norm.momentum for norm in self.norms for _ in range(2)]
        for row in rows:
            for buffer, statistic, momentum in zip(buffers, row.split(sizes), momenta, strict=True):
                move_statistics(buffer, statistic.view_as(buffer), momentum)
        for name, by in self.counters.items():
            tensors["buffer", name].add_(by * (microbatches - len(statistics)))
