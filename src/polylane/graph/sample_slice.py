"""Part: the samples that a worker has in hand, and all that an operator may need to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TensorRegion:
    """Which elements of a value are in hand, where others hold the rest.

    Attributes:
        cuts: for every dimension that is cut: its number, its whole size, and what is in hand of it as (start, stop)
            in ascending order. Of the dimension of the samples the whole are this worker's samples. All other
            dimensions are in hand as a whole.
    """

    cuts: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The shape of the whole value, of which a piece of ``shape`` is in hand.

        Raises:
            ValueError: the piece is not what this region is of a value.
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
        samples: how many samples are in hand.
        first: position of the first of them in the whole batch.
        batch: samples in the whole batch.
        microbatch: which microbatch they belong to.
        step: which step, from 0.
        seed: of all random numbers.
        weight: 1, or 0 for a stand-in: a replica without samples of its own computes on another's and counts for
            nothing, so that every collective inside a forward or backward pass finds all its members.
        sum_replicas: sums a tensor over the replicas of this microbatch, in place; None when there is only one.
        region: of a random value that is cut over ranks: which of its numbers are drawn here; None: all of them.
        loss_samples: samples over which the loss is a mean; 0: all of the batch.
        whole: the value of a statistic over all those samples, by its node's name, given the one of these samples;
            None where these are all.
    """

    samples: int
    first: int = 0
    batch: int = 0
    microbatch: int = 0
    step: int = 0
    seed: int = 0
    weight: int = 1
    sum_replicas: Callable[[Tensor], Tensor] | None = None
    region: TensorRegion | None = None
    loss_samples: int = 0
    whole: Callable[[str, Any], Any] | None = None

    @property
    def count_loss_samples(self) -> int:
        """Samples over which the loss is a mean."""
        return self.loss_samples or self.batch or self.samples
