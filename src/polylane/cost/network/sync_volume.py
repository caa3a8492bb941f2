"""Communication volume of gradient synchronization: closed forms, against which a transport's counters are checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from polylane.graph.sparse_gradients import sparse_gradient_bytes
from polylane.plan.sync import PowerSGDOptions, SyncOptions, TopKOptions


@dataclass(frozen=True)
class TrainedTensor:
    """A trained tensor, or the shard of one, on a worker.

    Attributes:
        shape: local shape on the worker.
        itemsize: bytes of one element.
        ranks: number of workers that reduce its gradient; 1 without replicas.
        only_replicas: whether these are exactly the replicas of one stage.
        sparse_rows: most rows of a sparse gradient that the worker has in a step; None for an ordinary gradient.
        goes_to_server: whether its gradient leaves this worker's process for a parameter server: not if the server runs
            in the same process, or if another worker of the replica sends the same tensor.
        gathered_itemsize: bytes of one element on its way to the passes of ZeRO-3, which gather what they cast anyway
            in the dtype that they cast to; None: ``itemsize``.
    """

    shape: tuple[int, ...]
    itemsize: int
    ranks: int
    only_replicas: bool = True
    goes_to_server: bool = True
    sparse_rows: int | None = None
    gathered_itemsize: int | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.itemsize

    @property
    def gradient_sum_bytes(self) -> float:
        """Bytes that the worker sends to sum its uncompressed gradient: an all-reduce, or an exchange of rows."""
        if self.sparse_rows is None:
            return all_reduce_bytes(self.nbytes, self.ranks)
        # The number of rows first, then the rows, to each other worker.
        return (self.ranks - 1) * (8 + sparse_gradient_bytes(self.sparse_rows, self.shape, self.itemsize))


def compute_sync_bytes(
    sync: SyncOptions, tensors: Sequence[TrainedTensor], step: int, microbatches: int = 1, answers: float = 0.0
) -> float:
    """Return the bytes that one worker sends in a step to synchronize the replicas.

    With n bytes of gradients, p workers and m microbatches:

    * An all-reduce is a reduce-scatter and an all-gather: 2 n (p - 1) / p (Patarasuk and Yuan 2009, section 3), or
      2 n (p - 1) summed over all workers.
    * ZeRO-1 sends as much. ZeRO-2 reduce-scatters gradients in each of m backward passes, since no worker has memory
      for all of them, and gathers weights once: (m + 1) n (p - 1) / p. ZeRO-3 gathers weights in every forward and
      every backward pass as well: 3 m n (p - 1) / p, and 2 m n (p - 1) / p for weights of float32 that the passes
      cast to 16 bits. With one microbatch the former are the 1 and 1.5 times of Rajbhandari et al. 2020, section 7.
    * Local SGD averages weights in one of k steps: as much in that one, nothing in the others.
    * A worker sends n to parameter servers, which send n to each worker: 2 n p in all (Li et al., OSDI 2014). Traffic
      between a worker and a server in one process does not leave it: 2 n (p - 1) in all, and a worker that hosts
      servers sends the weights that they return.

    All-reduces of at most 64 KB over more than two workers in shared memory are sent directly to every other worker,
    which saves the steps of a ring: n (p - 1) bytes leave a worker, p / 2 times as many as in a ring.

    Args:
        sync: the plan's options of gradient synchronization.
        tensors: trained tensors on the worker.
        step: number of the step, counted from 0.
        microbatches: number of microbatches of the step.
        answers: bytes of weights that servers in this worker's process send to other processes.
    """
    # ``inner`` are the reductions that are no replica synchronization: over operator axes and tied weights, every step.
    if sync.has_servers:
        inner = sum(tensor.gradient_sum_bytes for tensor in tensors if not tensor.only_replicas)
        return inner + sum(tensor.nbytes for tensor in tensors if tensor.goes_to_server) + answers
    if sync.every > 1 and step >= sync.warmup:
        due = (step + 1 - sync.warmup) % sync.every == 0
        inner = sum(tensor.gradient_sum_bytes for tensor in tensors if not tensor.only_replicas)
        return inner + (
            sum(all_reduce_bytes(tensor.nbytes, tensor.ranks) for tensor in tensors if tensor.only_replicas)
            if due
            else 0.0
        )
    return sum(
        _all_reduce_step_bytes(sync, tensor, step, microbatches) if tensor.only_replicas else tensor.gradient_sum_bytes
        for tensor in tensors
    )


def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` sends in an all-reduce."""
    return 2 * nbytes * (ranks - 1) / ranks


def count_top_k_entries(fraction: float, elements: int) -> int:
    """Return how many elements top-k sends: ceil(fraction x elements).

    The fraction is taken as its decimal digits, not as the binary float: 0.1 of 30 is exactly 3.
    """
    return math.ceil(Fraction(str(fraction)) * elements)


def _all_reduce_step_bytes(sync: SyncOptions, tensor: TrainedTensor, step: int, microbatches: int) -> float:
    """Return the bytes that one worker sends for one tensor that replicas reduce in every step."""
    if tensor.sparse_rows is not None:
        return tensor.gradient_sum_bytes
    if sync.shard != "none":
        return _sharded_step_bytes(sync, tensor, microbatches)
    if sync.wire != "same":
        return all_reduce_bytes(tensor.elements * 2, tensor.ranks)
    if isinstance(sync.compress, TopKOptions):
        # Top-k entries cannot be summed in a ring: values and int32 indices are all-gathered.
        return (tensor.ranks - 1) * count_top_k_entries(sync.compress.fraction, tensor.elements) * (tensor.itemsize + 4)
    if isinstance(sync.compress, PowerSGDOptions) and step >= sync.compress.start:
        # PowerSGD: the factors P (rows x rank) and Q (columns x rank) of the matrix, at least in float32;
        # tensors that this would not shrink are sent as they are.
        rows = tensor.shape[0] if tensor.shape else 1
        thin = sync.compress.rank * (rows + tensor.elements // max(rows, 1)) * max(tensor.itemsize, 4)
        return all_reduce_bytes(min(thin, tensor.nbytes), tensor.ranks)
    return all_reduce_bytes(tensor.nbytes, tensor.ranks)


def _sharded_step_bytes(sync: SyncOptions, tensor: TrainedTensor, microbatches: int) -> float:
    """Return the bytes of reduce-scatters and all-gathers within a group, and of the all-reduce across groups."""
    within = min(sync.within or tensor.ranks, tensor.ranks)
    within_bytes = tensor.nbytes * (within - 1) / within
    across = all_reduce_bytes(tensor.nbytes / within, tensor.ranks // within)
    if sync.shard == "parameters":
        gathered = within_bytes * (tensor.gathered_itemsize or tensor.itemsize) / tensor.itemsize
        return microbatches * (within_bytes + 2 * gathered) + across
    times = 2 if sync.shard == "optimizer" else microbatches + 1
    return times * within_bytes + across
