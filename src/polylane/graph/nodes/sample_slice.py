"""Sample slices: one replica's local samples of a microbatch, and what operators may need to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TensorRegion:
    """The part of a value that is local, where other ranks have the rest.

    Attributes:
        cuts: for every sharded dimension its index, its whole length, and the local positions as (start, stop) in
            ascending order. Along the samples, the whole length is that of this worker's samples. Other dimensions are
            whole.
    """

    cuts: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]

    def whole(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole value, from the shape of its local part.

        Raises:
            ValueError: the local shape does not match this region.
        """
        result = list(shape)
        for dim, size, ranges in self.cuts:
            if not 0 <= dim < len(result) or result[dim] != sum(stop - start for start, stop in ranges):
                raise ValueError(f"{tuple(shape)} in hand is no region {ranges} of {size} along dimension {dim}")
            result[dim] = size
        return result


@dataclass(frozen=True)
class SampleSlice:
    """One replica's share of one microbatch of one step.

    Attributes:
        samples: number of local samples.
        first: position of the first local sample in the whole batch.
        batch: number of samples in the whole batch.
        microbatch: index of the microbatch in the step, from 0.
        step: index of the step, from 0.
        seed: seed of all random numbers.
        weight: 1, or 0 for padding samples: a replica without samples of its own computes on another's, and counts for
            nothing, so that every collective inside a forward or backward pass finds all its members.
        sum_replicas: sums a tensor over the replicas of this microbatch, in place; None when there is only one.
        keep_statistics: takes the mean and the unbiased variance of a batch normalization, in the order of the calls,
            where running statistics move at the end of the step (replicas in turn); None: they move at once.
        region: the local part of a random value that is sharded over ranks; None: all of it.
        loss_samples: number of samples over which the loss is a mean; 0: all of the batch.
        whole: returns a statistic over all those samples, from its node's name and the local value; None where the
            local samples are all.
        open_sizes: the batch's sizes that the graph leaves open, such as the length of its texts; empty where it was
            captured for one form of batches.
    """

    samples: int
    first: int = 0
    batch: int = 0
    microbatch: int = 0
    step: int = 0
    seed: int = 0
    weight: int = 1
    sum_replicas: Callable[[Tensor], Tensor] | None = None
    keep_statistics: Callable[[Tensor, Tensor], None] | None = None
    region: TensorRegion | None = None
    loss_samples: int = 0
    whole: Callable[[str, Any], Any] | None = None
    open_sizes: tuple[int, ...] = ()

    @property
    def count_loss_samples(self) -> int:
        """Number of samples over which the loss is a mean."""
        return self.loss_samples or self.batch or self.samples

    def narrow(self, shape: Sequence[int], bounds: Mapping[int, tuple[int, int]]) -> SampleSlice:
        """Return this slice for a box of a random value: only the box's numbers are drawn.

        Args:
            shape: local shape of the value, which may itself be a region of a whole one.
            bounds: local positions of the box as (start, stop), by dimension; other dimensions are not cut.
        """
        cuts = {dim: (dim, size, spans) for dim, size, spans in self.region.cuts} if self.region else {}
        for dim, (start, stop) in bounds.items():
            if (start, stop) != (0, shape[dim]):
                _, size, spans = cuts.get(dim, (dim, shape[dim], ((0, shape[dim]),)))
                cuts[dim] = dim, size, _narrow_spans(spans, start, stop)
        return replace(self, region=TensorRegion(tuple(cuts[dim] for dim in sorted(cuts))) if cuts else None)


def _narrow_spans(spans: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the positions that the start-th to the (stop-1)-th of the positions in ``spans`` are."""
    parts, passed = [], 0
    for low, high in spans:
        begin, end = max(low, low + start - passed), min(high, low + stop - passed)
        if begin < end:
            parts.append((begin, end))
        passed += high - low
    return tuple(parts)
