"""Batch split: which samples each microbatch and each replica computes; batches of which a rank loads only its samples.

The batch is split twice, both times as evenly as possible: first into microbatches, then each microbatch over the
replicas. For 10 samples, microbatches=2 and data=3:

    microbatch            0                   1
    samples               0 1 2 3 4           5 6 7 8 9
    replica 0             0 1                 5 6
    replica 1                 2 3                 7 8
    replica 2                     4                   9

A plan may give replicas unequal shares (``shares=2:1``), which are rounded to whole samples. Where replicas take turns,
a microbatch is not split again: replica r of d has microbatches r, r + d, r + 2d, ...
"""

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
from polylane.graph.batch_checks import refuse_unequal_rows


@dataclass(frozen=True)
class SampleShare:
    """One replica's samples of one microbatch, as positions in the whole batch.

    Attributes:
        microbatch: number of the microbatch, from 0.
        start: position of the first sample, from 0.
        stop: position behind the last sample.
        weight: 1; 0 for a replica without samples of its own, which computes on the microbatch's first sample as
            padding (so that it still takes part in every collective) and is excluded from loss and gradients.
    """

    microbatch: int
    start: int
    stop: int
    weight: int

    @property
    def samples(self) -> int:
        """Number of samples that are computed on, padding included."""
        return self.stop - self.start


def compute_shares(
    batch: int, microbatches: int, replicas: int | Sequence[int], replica: int, in_turn: bool = False
) -> tuple[SampleShare, ...]:
    """Compute the shares of one replica: one for each microbatch that has samples at all.

    Of replicas in turn, those in a batch that is too short for all of them have none.

    Args:
        batch: samples of the whole batch.
        microbatches: number of microbatches that it is divided into.
        replicas: number of replicas, the data-parallel degree; or what each has in proportion to the others.
        replica: index of the replica whose shares are returned.
        in_turn: whether the replicas compute whole microbatches in turn.
    """
    result = []
    for microbatch, (begin, end) in enumerate(split_bounds(batch, microbatches)):
        if begin == end:
            continue
        if in_turn:
            assert isinstance(replicas, int)  # a plan's shares are of microbatches that are split
            if microbatch % replicas == replica:
                result.append(SampleShare(microbatch, begin, end, 1))
            continue
        start, stop = (begin + b for b in split_bounds(end - begin, replicas)[replica])
        # A microbatch with fewer samples than replicas: the last replicas get padding instead of nothing, or they would
        # be missing in the collectives inside forward and backward passes (batch normalization, split operators).
        empty = start == stop
        result.append(SampleShare(microbatch, begin if empty else start, begin + 1 if empty else stop, int(not empty)))
    return tuple(result)


# The samples of a replica in turn that has no microbatch of a batch: one, which counts for nothing.
PADDING = SampleShare(0, 0, 1, 0)


def count_replica_samples(batch: int, microbatches: int, replicas: int | Sequence[int]) -> list[int]:
    """Count the samples of a batch that each replica computes, padding excluded; by replica."""
    count = replicas if isinstance(replicas, int) else len(replicas)
    replica_shares = (compute_shares(batch, microbatches, replicas, replica) for replica in range(count))
    return [sum(share.samples * share.weight for share in shares) for shares in replica_shares]


@dataclass(frozen=True)
class BatchForm:
    """How flat leaves make up a batch: its pytree structure.

    Attributes:
        rebuild: function from a list of leaves to a batch.
        structure: how the batch is nested, hashable; see :func:`polylane.graph.batch.batch_structure`.
    """

    rebuild: Rebuild
    structure: Any

    @classmethod
    def of_batch(cls, batch: Any) -> BatchForm:
        """Return the form of a batch."""
        return cls(flatten(batch)[1], batch_structure(batch))


@dataclass(eq=False)
class Batch:
    """A batch of which this worker may have only the samples that it computes on.

    Attributes:
        samples: number of samples of the whole batch, over all replicas.
        leaves: flat leaves; of the whole batch, or of this worker's samples in the order of its shares.
        offsets: by microbatch, the row of ``leaves`` where its share begins; None when they hold the whole batch.
        split: for each leaf, whether it is split with the samples; None: those with as many rows as the first.
        shortest: samples of the shortest batch of the same epoch; 0: those of this one, the only one known.
        form: how its leaves make up a batch; None: as those of the example batch do.
        is_collated: whether a function of the user's own collated this worker's samples, and may have padded them.
        loaded_samples: samples of the dataset that the whole batch was made of; 0: it comes from no dataset.
        read_order: a number for the samples that the whole batch was to be made of; 0: it comes from no dataset.
        read_samples: leaves of some of these samples, where every worker has read all of them; empty: ``leaves`` tell.
    """

    samples: int
    leaves: Sequence[Any]
    offsets: dict[int, int] | None = None
    split: Sequence[bool] | None = None
    shortest: int = 0
    form: BatchForm | None = None
    is_collated: bool = False
    loaded_samples: int = 0
    read_order: int = 0
    read_samples: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.shortest = self.shortest or self.samples

    @cached_property
    def sampled(self) -> tuple[bool, ...]:
        """Whether each leaf is split with the samples, leaf by leaf."""
        return sampled_leaves(self.leaves) if self.split is None else tuple(self.split)

    @property
    def has_common_tensors(self) -> bool:
        """Whether a tensor belongs to the batch as a whole: it may name samples by position, as edges name nodes."""
        pairs = zip(self.leaves, self.sampled, strict=True)
        return any(isinstance(leaf, Tensor) and not is_split for leaf, is_split in pairs)

    @property
    def is_whole(self) -> bool:
        """Whether this worker has all samples of the batch, in order."""
        return self.offsets is None or sample_count(self.leaves) == self.samples

    @classmethod
    def whole(cls, batch: Any) -> Batch:
        """Wrap a batch of which this worker has all samples; it must be the same on every worker."""
        leaves, _ = flatten(batch)
        return cls(sample_count(leaves), leaves, form=BatchForm.of_batch(batch))

    def leaves_of(self, share: SampleShare, rows: int | None = None) -> list[Any]:
        """Return the leaves of one share, or of its first ``rows`` samples."""
        start = share.start if self.offsets is None else self.offsets[share.microbatch]
        return take_samples(self.leaves, start, start + (share.samples if rows is None else rows), self.sampled)

    def to_device(self, sampled: Sequence[bool], device: torch.device) -> Batch:
        """Return this batch on a device, with its leaves split as those of the example batch.

        Sizes alone do not say which leaves are split: a worker may happen to have as many samples as there are class
        weights.

        Args:
            sampled: for each leaf of the example batch, whether it is split with the samples.
            device: the device of the worker that computes on it.

        Raises:
            PolylaneError: tensors that have samples differ in the number of these.
        """
        # The example decides only where it fits: as many leaves, and a tensor wherever the example splits one. A batch
        # of another form falls back on the sizes of its own leaves.
        tensors = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in self.leaves]
        matches_example = len(sampled) == len(tensors) and all(
            t for t, is_split in zip(tensors, sampled, strict=True) if is_split
        )
        split_flags = sampled if matches_example and self.split is None else self.sampled
        refuse_unequal_rows(self.leaves, split_flags, None if self.form is None else self.form.structure)
        moved = to_device(self.leaves, device)
        return Batch(self.samples, moved, self.offsets, split_flags, self.shortest, self.form, self.is_collated)

    def __len__(self) -> int:
        return self.samples


def share_offsets(shares: Sequence[SampleShare]) -> dict[int, int]:
    """Return, by microbatch, the row at which its share begins when a worker's shares are concatenated in order."""
    result, at = {}, 0
    for share in shares:
        result[share.microbatch] = at
        at += share.samples
    return result


def list_positions(shares: Sequence[SampleShare]) -> list[int]:
    """Return the positions in the whole batch of the samples of some shares, in order."""
    return [i for share in shares for i in range(share.start, share.stop)]
