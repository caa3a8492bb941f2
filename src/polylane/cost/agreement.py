"""What replicas send each other to agree, by theory: the closed forms that a transport's counters are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polylane.plan.sync import PowerSGD, Sync, TopK


@dataclass(frozen=True)
class Held:
    """A trained tensor that a worker holds, or its part of one.

    Attributes:
        shape: of what it holds.
        itemsize: bytes of a number.
        ranks: how many workers sum its gradient; 1 where nobody else has it.
        replicas: whether these are the replicas of one stage, and no others.
    """

    shape: tuple[int, ...]
    itemsize: int
    ranks: int
    replicas: bool = True

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they have."""
        return self.elements * self.itemsize


def sent(sync: Sync, held: Sequence[Held], step: int) -> float:
    """Bytes that one worker sends in a step so that all agree on weights.

    * A sum over p workers is a reduce-scatter and an all-gather: 2 n (p - 1) / p (Patarasuk and Yuan 2009, section 3),
      2 n (p - 1) of all workers together.
    * ZeRO-1 and -2 send as much, ZeRO-3 half as much again (Rajbhandari et al. 2020, section 7).
    * Weights that are averaged in one of k steps: as much in that one, nothing in the others.
    * To parameter servers a worker sends n, and they send n to each: 2 n p in all (Li et al., OSDI 2014).

    Args:
        sync: how they agree.
        held: by the worker.
        step: which one, from 0.
    """
    if sync.serves:
        inner = sum(reduced(each.nbytes, each.ranks) for each in held if not each.replicas)
        return inner + sum(each.nbytes for each in held)
    if sync.every > 1 and step >= sync.warmup:
        due = (step + 1 - sync.warmup) % sync.every == 0
        inner = sum(reduced(each.nbytes, each.ranks) for each in held if not each.replicas)
        return inner + (sum(reduced(each.nbytes, each.ranks) for each in held if each.replicas) if due else 0.0)
    return sum(_summed(sync, each, step) if each.replicas else reduced(each.nbytes, each.ranks) for each in held)


def reduced(nbytes: float, ranks: int) -> float:
    """What each of so many ranks sends in a sum."""
    return 2 * nbytes * (ranks - 1) / ranks


def _summed(sync: Sync, held: Held, step: int) -> float:
    """What one worker sends of one tensor that replicas sum in every step."""
    if sync.shard != "none":
        return _sharded(sync, held)
    if sync.wire != "same":
        return reduced(held.elements * 2, held.ranks)
    if isinstance(sync.compress, TopK):
        count = math.ceil(sync.compress.fraction * held.elements - 1e-9)
        return (held.ranks - 1) * count * (held.itemsize + 4)
    if isinstance(sync.compress, PowerSGD) and step >= sync.compress.start:
        rows = held.shape[0] if held.shape else 1
        thin = sync.compress.rank * (rows + held.elements // max(rows, 1)) * max(held.itemsize, 4)
        return reduced(min(thin, held.nbytes), held.ranks)
    return reduced(held.nbytes, held.ranks)


def _sharded(sync: Sync, held: Held) -> float:
    """Reduce-scatter and all-gather within a group, a sum of the parts across groups; ZeRO-3 gathers once more."""
    within = min(sync.within or held.ranks, held.ranks)
    each = held.nbytes * (within - 1) / within
    across = reduced(held.nbytes / within, held.ranks // within)
    return (3 if sync.shard == "parameters" else 2) * each + across
