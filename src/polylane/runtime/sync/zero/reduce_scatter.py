"""ZeRO gradient reduce-scatter in buckets, overlapped with the backward pass: each replica keeps its shard of the sum.

    ZeRO      reduce-scatters of a bucket      kept between backward passes
    1         one a step, in the last pass     full gradients
    2, 3      one in every backward pass       the shard's sum over the passes so far

So with ZeRO-2 and -3 no worker ever has all gradients; m microbatches take m reduce-scatters. ZeRO-2 sends m + 1 times
n (p - 1) / p bytes a step, with the all-gather of n bytes of parameters over p replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polylane.program.program import GradientBucket
from polylane.runtime.parameters.zero_shards import FlatBuffer, Shards
from polylane.runtime.span_clock import CollectiveWaits, Mark
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.flat_packing import flatten_tensors
from polylane.runtime.sync.zero.all_gather_passes import GatheredPasses
from polylane.runtime.transport.protocol import PendingTransfer, Transport
from polylane.runtime.transport.staged import HostStaging


@dataclass
class BucketShard:
    """One worker's shard of one bucket's sum.

    Attributes:
        bucket: gradients of a unit, or of some of its parameters.
        flat_buffer: flat buffer of the unit with the bucket's parameters.
        cross_ranks: ranks that sum the same shard in shard groups of their own, this one among them.
        optional: names of the bucket's parameters that may get no gradient.
        sizes: number of elements of each rank's shard of the bucket.
        parameters: the bucket's parameters by name, in their order in the unit.
        with_gradient: names of parameters that had a gradient on this worker in the step.
        shard_sum: this worker's shard of the sum over its shard group and the passes so far; None before the first.
        pending_cross_sum: pending all-reduce of ``shard_sum`` over ``cross_ranks``, or None.
        pending_flags: pending sum over all ranks of whether each of ``optional`` has a gradient, or None.
    """

    bucket: GradientBucket
    flat_buffer: FlatBuffer
    cross_ranks: tuple[int, ...]
    optional: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    with_gradient: set[str] = field(default_factory=set)
    shard_sum: Tensor | None = None
    pending_cross_sum: PendingTransfer | None = None
    pending_flags: PendingTransfer | None = None

    def __post_init__(self) -> None:
        flat = self.flat_buffer
        indices = [i for i, name in enumerate(flat.unit.parameters) if name in self.bucket.parameters]
        self.parameters = {flat.unit.parameters[i]: flat.parameters[i] for i in indices}
        spans = [flat.spans[i] for i in indices]
        self.sizes = tuple(sum(max(0, min(b, end) - max(a, begin)) for a, b in spans) for begin, end in flat.bounds)


@dataclass
class _PendingBucketShard:
    bucket_shard: BucketShard
    pending: PendingTransfer
    flags: PendingTransfer | None
    is_last_pass: bool


class ReduceScatterer(AllReducer):
    """Reduce-scatters gradients so that every replica has its shard of the sum.

    A bucket that its ranks do not cut in the same way (weights tied between stages with different numbers of replicas)
    is all-reduced, as without ZeRO, and cut afterwards.

    Args:
        slices: buckets that are reduce-scattered, in the order of reduction.
        other_buckets: buckets that are all-reduced, in the order of reduction.
        parameters: the model's parameters of all buckets, by canonical name.
        optional: names of parameters that may get no gradient in some step.
        transport: connects all training workers; the shard groups are among its groups.
        shards: ZeRO shards of this worker.
        waits: counter to which time of the running action is added.
        each_pass: reduce after each backward pass and keep no full gradients (ZeRO-2, -3); else after the last one.
        passes: releases a unit once its gradients have been sent (ZeRO-3); None where parameters stay full.
    """

    def __init__(
        self,
        slices: Sequence[BucketShard],
        other_buckets: Sequence[GradientBucket],
        parameters: Mapping[str, nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        shards: Shards,
        waits: CollectiveWaits,
        *,
        each_pass: bool,
        passes: GatheredPasses | None,
    ) -> None:
        super().__init__(other_buckets, parameters, optional, transport)
        self.bucket_names += tuple(bucket_shard.bucket.name for bucket_shard in slices)
        self._slices, self._shards, self._each_pass, self._passes = tuple(slices), shards, each_pass, passes
        self._waits = waits
        self._whole_buckets = [
            b for b in other_buckets if len(b.ranks) > 1 and any(name in shards.buffer_of for name in b.parameters)
        ]
        early = [not bucket_shard.optional for bucket_shard in self._slices]
        self._slice_launcher = BucketLauncher([bucket_shard.parameters for bucket_shard in self._slices], early)
        self._is_last_pass = False
        self._in_flight: deque[_PendingBucketShard] = deque()
        self._started_at: dict[str, Mark] = {}

    # ---- passes ------------------------------------------------------------------------------------------------------

    def begin_last_backward(self) -> None:
        super().begin_last_backward()
        self._is_last_pass = True

    def begin_backward(self) -> None:
        """Register the hooks of a backward pass that reduces; called before every backward pass."""
        if self._is_last_pass or self._each_pass:
            self._slice_launcher.begin(self._launch_shard)

    def end_backward(self) -> None:
        """Launch what is left of a backward pass that reduces; called after every backward pass."""
        if not (self._is_last_pass or self._each_pass):
            return
        self._slice_launcher.end(self._launch_shard)
        # Only the last pass of a step leaves reductions pending, for wait_bucket.
        if not self._is_last_pass:
            self._wait_in_flight(0)
        self._is_last_pass = False

    # ---- one bucket --------------------------------------------------------------------------------------------------

    def _launch_shard(self, index: int) -> None:
        bucket_shard = self._slices[index]
        silent = self._transport.rank in bucket_shard.bucket.zero_contributors
        grads = {name: p.grad for name, p in bucket_shard.parameters.items() if p.grad is not None and not silent}
        vector = flatten_tensors(
            [grads[name] if name in grads else p.new_zeros(p.shape) for name, p in bucket_shard.parameters.items()]
        )
        name = bucket_shard.bucket.name
        bucket_shard.with_gradient |= grads.keys()
        grads.clear()  # with each_pass the vector must hold the last reference to the full gradients
        if self._each_pass:
            for parameter in bucket_shard.parameters.values():
                parameter.grad = None
            if self._passes is not None:
                self._passes.release_reduced(bucket_shard.flat_buffer)
        if name not in self._started_at:
            self._started_at[name], self.bucket_bytes[name] = self._waits.clock.mark(), 0
        pending = self._transport.reduce_scatter(vector, bucket_shard.flat_buffer.ranks, bucket_shard.sizes)
        self.bucket_bytes[name] += vector.nbytes
        flags = self._start_flag_sum(bucket_shard, vector) if self._is_last_pass and bucket_shard.optional else None
        self._in_flight.append(_PendingBucketShard(bucket_shard, pending, flags, self._is_last_pass))
        # One bucket in flight: while it is sent, the next one's gradients are computed, and at most two are in memory.
        del vector
        self._wait_in_flight(1)

    def _start_flag_sum(self, bucket_shard: BucketShard, like: Tensor) -> PendingTransfer:
        flags = torch.tensor(
            [float(name in bucket_shard.with_gradient) for name in bucket_shard.optional], dtype=like.dtype
        )
        had = HostStaging(like.device).to_device(flags)
        self.bucket_bytes[bucket_shard.bucket.name] += had.nbytes
        return self._transport.all_reduce(had, bucket_shard.bucket.ranks)

    def _wait_in_flight(self, limit: int) -> None:
        """Finish pending reductions in the order of their launch, until at most ``limit`` are left."""
        if len(self._in_flight) > limit:
            with self._waits.timing():
                while len(self._in_flight) > limit:
                    self._finish_reduce(self._in_flight.popleft())

    def _finish_reduce(self, flight: _PendingBucketShard) -> None:
        bucket_shard = flight.bucket_shard
        part = flight.pending.wait()
        bucket_shard.shard_sum = part if bucket_shard.shard_sum is None else bucket_shard.shard_sum.add_(part)
        if not flight.is_last_pass:
            return
        bucket_shard.pending_flags = flight.flags
        if len(bucket_shard.cross_ranks) > 1:
            # Not waited for inside the pass: another stage that takes part may itself wait for this pass's outputs.
            self.bucket_bytes[bucket_shard.bucket.name] += bucket_shard.shard_sum.nbytes
            bucket_shard.pending_cross_sum = self._transport.all_reduce(
                bucket_shard.shard_sum, bucket_shard.cross_ranks
            )
        else:
            self._install_gradients(bucket_shard)

    def _install_gradients(self, bucket_shard: BucketShard) -> None:
        """Install the summed shard as gradients of the optimizer's parameters."""
        total = (
            bucket_shard.shard_sum if bucket_shard.pending_cross_sum is None else bucket_shard.pending_cross_sum.wait()
        )
        assert total is not None
        at = 0
        for name, parameter in bucket_shard.parameters.items():
            piece = bucket_shard.flat_buffer.optimizer_parts[name]
            if piece is None:
                continue
            size = piece.end - piece.begin
            gradient, at = total[at : at + size].view(piece.parameter.shape), at + size
            if parameter.grad is None:
                piece.parameter.grad = gradient
            else:  # ZeRO-1: reuse the memory of the full gradient
                parameter.grad = parameter.grad.contiguous()
                piece.parameter.grad = piece.slice_of(parameter.grad).copy_(gradient)
        if bucket_shard.pending_flags is not None:
            self._drop_gradients(bucket_shard, bucket_shard.pending_flags.wait())
        bucket_shard.shard_sum = bucket_shard.pending_cross_sum = bucket_shard.pending_flags = None
        bucket_shard.with_gradient.clear()

    def _drop_gradients(self, bucket_shard: BucketShard, flags: Tensor) -> None:
        """Set gradients to None that no rank has, so that the optimizer skips these parameters."""
        for name, had in zip(bucket_shard.optional, flags.tolist(), strict=True):
            piece = bucket_shard.flat_buffer.optimizer_parts[name]
            if piece is not None and not had > 0:
                piece.parameter.grad = None

    # ---- after the last pass -----------------------------------------------------------------------------------------

    def wait_bucket(self, name: str) -> Mark:
        if name not in self._started_at:
            started = super().wait_bucket(name)
            self._shard_gradients(name)
            return started
        # Reductions complete in the order of launch: finish all up to this bucket.
        while any(flight.bucket_shard.bucket.name == name for flight in self._in_flight):
            self._finish_reduce(self._in_flight.popleft())
        for bucket_shard in self._slices:
            if bucket_shard.bucket.name == name and bucket_shard.shard_sum is not None:
                self._install_gradients(bucket_shard)
        return self._started_at.pop(name)

    def _shard_gradients(self, name: str) -> None:
        for parameter_name in next((b.parameters for b in self._whole_buckets if b.name == name), ()):
            if (flat := self._shards.buffer_of.get(parameter_name)) is None:
                continue
            piece, parameter = flat.optimizer_parts[parameter_name], self._parameters[parameter_name]
            if piece is not None and parameter.grad is not None:
                piece.parameter.grad = piece.slice_of(parameter.grad)
            if self._each_pass:
                parameter.grad = None
