"""What replicas send each other to agree, by theory: the closed forms that a transport's counters are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from polylane.plan.sync import PowerSGDOptions, SyncOptions, TopKOptions


@dataclass(frozen=True)
class TrainedTensor:
    """A trained tensor that a worker holds, or its part of one.

    Attributes:
        shape: of what it holds.
        itemsize: bytes of a number.
        ranks: how many workers sum its gradient; 1 where nobody else has it.
        only_replicas: whether these are the replicas of one stage, and no others.
        goes_to_server: whether its gradient leaves this worker for a parameter server. Not where the server lives in
            the same process, or where another worker of the replica speaks for all that hold the same.
    """

    shape: tuple[int, ...]
    itemsize: int
    ranks: int
    only_replicas: bool = True
    goes_to_server: bool = True

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes they have."""
        return self.elements * self.itemsize


def compute_sync_bytes(
    sync: SyncOptions, held: Sequence[TrainedTensor], step: int, microbatches: int = 1, answers: float = 0.0
) -> float:
    """Bytes that one worker sends in a step so that all agree on weights.

    * A sum over p workers is a reduce-scatter and an all-gather: 2 n (p - 1) / p (Patarasuk and Yuan 2009, section 3),
      2 n (p - 1) of all workers together.
    * ZeRO-1 sends as much. In each of m backward passes ZeRO-2 scatters gradients anew, for no worker has memory for
      all of them, and gathers weights once: (m + 1) n (p - 1) / p. ZeRO-3 gathers weights in every forward and every
      backward pass as well: 3 m n (p - 1) / p. With one microbatch these are the 1 and 1.5 times of Rajbhandari et al.
      2020, section 7.
    * Weights that are averaged in one of k steps: as much in that one, nothing in the others.
    * To parameter servers a worker sends n, and they send n to each: 2 n p in all (Li et al., OSDI 2014). What goes
      between a worker and a server in one process does not leave it: 2 n (p - 1) in all, and a worker that hosts
      servers sends what these answer.

    A sum of at most 64 KB over more than two workers that share memory goes straight to each of them, for that is one
    message after the other less: n (p - 1) leave a worker, p / 2 times what a ring would send.

    Args:
        sync: how they agree.
        held: by the worker.
        step: which one, from 0.
        microbatches: forward and backward passes of the step.
        answers: bytes of the weights that parameter servers in this worker's process send to other processes.
    """
    if sync.has_servers:
        inner = sum(all_reduce_bytes(each.nbytes, each.ranks) for each in held if not each.only_replicas)
        return inner + sum(each.nbytes for each in held if each.goes_to_server) + answers
    if sync.every > 1 and step >= sync.warmup:
        due = (step + 1 - sync.warmup) % sync.every == 0
        inner = sum(all_reduce_bytes(each.nbytes, each.ranks) for each in held if not each.only_replicas)
        return inner + (
            sum(all_reduce_bytes(each.nbytes, each.ranks) for each in held if each.only_replicas) if due else 0.0
        )
    return sum(
        _all_reduce_step_bytes(sync, each, step, microbatches)
        if each.only_replicas
        else all_reduce_bytes(each.nbytes, each.ranks)
        for each in held
    )


def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """What each of so many ranks sends in a sum."""
    return 2 * nbytes * (ranks - 1) / ranks


def count_top_k_entries(fraction: float, elements: int) -> int:
    """How many of so many elements top-k sends: ceil(fraction x elements).

    The fraction is what its decimal digits say: 0.1 of 30 is 3, and not what the binary number makes it.
    """
    return math.ceil(Fraction(str(fraction)) * elements)


def _all_reduce_step_bytes(sync: SyncOptions, held: TrainedTensor, step: int, microbatches: int) -> float:
    """What one worker sends of one tensor that replicas sum in every step."""
    if sync.shard != "none":
        return _sharded_step_bytes(sync, held, microbatches)
    if sync.wire != "same":
        return all_reduce_bytes(held.elements * 2, held.ranks)
    if isinstance(sync.compress, TopKOptions):
        return (held.ranks - 1) * count_top_k_entries(sync.compress.fraction, held.elements) * (held.itemsize + 4)
    if isinstance(sync.compress, PowerSGDOptions) and step >= sync.compress.start:
        rows = held.shape[0] if held.shape else 1
        thin = sync.compress.rank * (rows + held.elements // max(rows, 1)) * max(held.itemsize, 4)
        return all_reduce_bytes(min(thin, held.nbytes), held.ranks)
    return all_reduce_bytes(held.nbytes, held.ranks)


def _sharded_step_bytes(sync: SyncOptions, held: TrainedTensor, microbatches: int) -> float:
    """Reduce-scatters and all-gathers within a group, once a step a sum of the parts across groups."""
    within = min(sync.within or held.ranks, held.ranks)
    each = held.nbytes * (within - 1) / within
    across = all_reduce_bytes(held.nbytes / within, held.ranks // within)
    times = {"optimizer": 2, "gradients": microbatches + 1, "parameters": 3 * microbatches}[sync.shard]
    return times * each + across
