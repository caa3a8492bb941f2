"""Batch rows: which samples of a batch each worker reads, as a tape's batch, and gathered from all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch, BatchForm, SampleShare, list_positions, share_offsets
from polylane.graph.batch import flatten
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World
from polylane.script.loading.loaded_batch import LoadedBatch


class BatchRows:
    """The rows of batches that the workers of a training read.

    Args:
        shares: returns the shares that a worker, by its rank, computes of a batch with a number of samples.
        world: this worker among all workers of the training.
        transport: sends between all workers of the plan.
        training: says how batches are divided, and whether a graph reads whole ones.
    """

    def __init__(
        self,
        shares: Callable[[int, int], Sequence[SampleShare]],
        world: World,
        transport: Transport,
        training: CompiledTraining,
    ) -> None:
        self._shares, self._world, self._transport, self._training = shares, world, transport, training
        self._known = dict[int, list[list[int]]]()  # by the samples of a batch, what each rank reads

    def find_positions(self, samples: int) -> list[int] | None:
        """Return the positions in a batch of the samples that this worker reads; None: all workers read all."""
        everyone = self._positions_of(samples)
        return None if everyone is None else everyone[self._world.rank]

    def _positions_of(self, samples: int) -> list[list[int]] | None:
        if self._training.reads_whole_batches:
            return None
        if samples not in self._known:
            ranks = range(self._world.size)
            self._known[samples] = [list_positions(self._shares(samples, rank)) for rank in ranks]
        everyone = self._known[samples]
        return None if all(len(positions) == samples for positions in everyone) else everyone

    def take(self, tape_batch: Any, split: Sequence[bool], loaded: Sequence[LoadedBatch]) -> Batch:
        """Return a tape's batch of which this worker has its samples.

        Args:
            tape_batch: the leaves that a layout has arranged, as one of the tape.
            split: for each leaf, whether it has the samples of :meth:`find_positions` along dimension 0.
            loaded: the batches of loaders that they were read of.
        """
        leaves, _ = flatten(tape_batch)
        samples = loaded[0].samples
        order = hash(tuple(batch.order for batch in loaded)) or 1
        offsets = share_offsets(self._shares(samples, self._world.rank))
        return Batch(samples, leaves, offsets, split, form=BatchForm.of_batch(tape_batch), read_order=order)

    def gather(self, rows: Tensor, samples: int) -> Tensor:
        """Return the rows that workers have read of a batch as one tensor, where these are; collective.

        Args:
            rows: what this worker has read, along dimension 0.
            samples: number of samples of the whole batch.
        """
        everyone, rank = self._positions_of(samples), self._world.rank
        assert everyone is not None
        giver = dict[int, int]()  # by position, the lowest rank that has it: it alone gives it
        for reader, positions in enumerate(everyone):
            for position in positions:
                giver.setdefault(position, reader)
        rows_given = {at: row for row, at in enumerate(everyone[rank]) if giver[at] == rank}
        result = torch.zeros((samples, *rows.shape[1:]), dtype=rows.dtype, device=self._world.device)
        if rows_given:
            result[list(rows_given)] = rows[list(rows_given.values())].to(self._world.device)
        # Sums of bytes are exact: of each but one summand is zero.
        wire = result.reshape(-1).view(torch.uint8)
        gathered: Tensor = self._transport.all_reduce(wire, range(self._transport.size)).wait()
        return gathered.view(rows.dtype).reshape(result.shape).to(rows.device)
