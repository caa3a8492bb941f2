"""Part: the samples that a worker has in hand, and all that an operator may need to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
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
    """

    samples: int
    first: int = 0
    batch: int = 0
    microbatch: int = 0
    step: int = 0
    seed: int = 0
    weight: int = 1
    sum_replicas: Callable[[Tensor], Tensor] | None = None
