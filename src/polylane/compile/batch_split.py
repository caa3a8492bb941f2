"""Which samples of a batch each microbatch and each replica gets, and batches of which a worker holds only its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polylane.graph.batch import (
    Rebuild,
    batch_structure,
    flatten,
    sample_count,
    sampled_leaves,
    split_bounds,
    take_samples,
    to_device,
)


@dataclass(frozen=True)
class SampleShare:
    """One replica's samples of one microbatch, as positions in the whole batch.

    ``weight`` is 0 for a replica that got none: it computes on the microbatch's first sample and counts for nothing.
    """

    microbatch: int
    start: int
    stop: int
    weight: int

    @property
    def samples(self) -> int:
        """How many samples are computed on."""
        return self.stop - self.start


def compute_shares(batch: int, microbatches: int, replicas: int, replica: int) -> tuple[SampleShare, ...]:
    """What ``replica`` computes of a batch: one share for each microbatch that has samples at all."""
    result = []
    for microbatch, (begin, end) in enumerate(split_bounds(batch, microbatches)):
        if begin == end:
            continue
        start, stop = (begin + b for b in split_bounds(end - begin, replicas)[replica])
        empty = start == stop
        result.append(SampleShare(microbatch, begin if empty else start, begin + 1 if empty else stop, int(not empty)))
    return tuple(result)


def count_replica_samples(batch: int, microbatches: int, replicas: int) -> list[int]:
    """The samples of a batch that count at each replica."""
    every = (compute_shares(batch, microbatches, replicas, replica) for replica in range(replicas))
    return [sum(share.samples * share.weight for share in own) for own in every]


@dataclass(frozen=True)
class BatchForm:
    """How flat leaves make up a batch.

    Attributes:
        rebuild: from leaves to a batch.
        structure: how it is nested, see :func:`polylane.graph.batch.batch_structure`.
    """

    rebuild: Rebuild
    structure: Any

    @classmethod
    def of_batch(cls, batch: Any) -> BatchForm:
        """That of a batch."""
        return cls(flatten(batch)[1], batch_structure(batch))


class Batch:
    """A batch of which this worker may hold only the samples that it computes on."""

    def __init__(
        self,
        samples: int,
        leaves: Sequence[Any],
        offsets: dict[int, int] | None = None,
        sampled: Sequence[bool] | None = None,
        shortest: int | None = None,
        form: BatchForm | None = None,
    ) -> None:
        """
        Args:
            samples: in the whole batch.
            leaves: flat leaves; of the whole batch, or of this worker's samples in the order of its shares.
            offsets: where in ``leaves`` each microbatch's share begins; None when they hold the whole batch.
            sampled: which leaves are split with the samples; default: those that have as many rows as the first.
            shortest: samples in the shortest batch of the same epoch; default: in this one, for no other is known.
            form: how its leaves make up a batch; default: as those of the example do.
        """
        self.samples = samples
        self.leaves = leaves
        self.shortest = samples if shortest is None else shortest
        self.form = form
        self._sampled = sampled
        self._offsets = offsets

    @cached_property
    def sampled(self) -> tuple[bool, ...]:
        """Of every leaf, whether it is split with the samples."""
        return sampled_leaves(self.leaves) if self._sampled is None else tuple(self._sampled)

    @classmethod
    def whole(cls, batch: Any) -> Batch:
        """A batch that is here entirely, the same on every worker."""
        leaves, _ = flatten(batch)
        return cls(sample_count(leaves), leaves, form=BatchForm.of_batch(batch))

    def leaves_of(self, share: SampleShare, rows: int | None = None) -> list[Any]:
        """The leaves of one share, or its first ``rows`` samples."""
        start = share.start if self._offsets is None else self._offsets[share.microbatch]
        return take_samples(self.leaves, start, start + (share.samples if rows is None else rows), self.sampled)

    def to_device(self, sampled: Sequence[bool], device: torch.device) -> Batch:
        """This batch on a device, its leaves split as those of an example were if it has that many of them.

        Their sizes alone do not tell: a worker may happen to have as many samples as there are class weights.
        """
        tensors = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in self.leaves]
        known = len(sampled) == len(tensors) and all(
            t for t, is_split in zip(tensors, sampled, strict=True) if is_split
        )
        own = sampled if known else self.sampled
        return Batch(self.samples, to_device(self.leaves, device), self._offsets, own, self.shortest, self.form)

    def __len__(self) -> int:
        return self.samples


def share_offsets(own: Sequence[SampleShare]) -> dict[int, int]:
    """Where each share begins when a worker's shares lie one behind the other."""
    result, at = {}, 0
    for share in own:
        result[share.microbatch] = at
        at += share.samples
    return result
