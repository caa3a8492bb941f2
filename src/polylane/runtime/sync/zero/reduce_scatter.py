"""Gradient reduce-scatter in buckets, in the backward pass, over replicas of which each keeps a part (ZeRO).

ZeRO-1 sums once a step, in the last backward pass, and keeps whole gradients until then. ZeRO-2 and -3 sum in every
backward pass and add up what they keep, so that no worker ever has all gradients at once: m microbatches take m
reduce-scatters (m + 1 times n (p - 1) / p bytes a step with the gathering of n bytes of parameters over p replicas).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from polylane.program.program import GradientBucket
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.flat_packing import flatten_tensors
from polylane.runtime.sync.zero.flat_shards import FlatBuffer, Shards
from polylane.runtime.tensor_parallel import CollectiveWaits
from polylane.runtime.transport.protocol import PendingTransfer, Transport


@dataclass
class BucketShard:
    """What one worker has of one bucket's sum.

    Attributes:
        bucket: a unit's gradients, or some of them.
        flat_buffer: the unit whose parameters the bucket has.
        cross_ranks: the ranks that sum the same part for shard groups of their own, with this one.
        optional: those of the parameters that may get no gradient at all.
        sizes: elements of each rank's part of the bucket.
        parameters: the bucket's by name, in their order in the unit.
        with_gradient: those of which this worker had a gradient in the step.
        shard_sum: this worker's part of the sum over its shard group, as far as it has come in the step.
        pending_cross_sum: its sum over ``crossing``, under way.
        pending_flags: whether anybody had a gradient of each of ``optional``, under way.
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
        flat, own = (
            self.flat_buffer,
            [i for i, n in enumerate(self.flat_buffer.unit.parameters) if n in self.bucket.parameters],
        )
        self.parameters = {flat.unit.parameters[i]: flat.parameters[i] for i in own}
        spans = [flat.spans[i] for i in own]
        self.sizes = tuple(sum(max(0, min(b, end) - max(a, begin)) for a, b in spans) for begin, end in flat.bounds)


@dataclass
class _PendingBucketShard:
    bucket_shard: BucketShard
    pending: PendingTransfer
    flags: PendingTransfer | None
    is_last_pass: bool


class ReduceScatterer(AllReducer):
    """Sums gradients so that every replica has its part of the sum.

    What not all replicas of a bucket cut in the same way (weights tied between stages with different numbers of
    replicas) is summed whole, as without shards, and then cut.

    Args:
        slices: the buckets that are cut, in the order of reduction.
        others: buckets that are summed whole.
        parameters: those of the buckets, as the model has them, by canonical name.
        optional: parameters that may get no gradient at all in some step.
        transport: between all training workers, with the shard groups among its groups.
        shards: what this worker holds.
        waits: of the action under way.
        each_pass: sum after each backward pass, and keep nothing whole; else after the last.
        used: is told of a unit whose gradients have left.
    """

    def __init__(
        self,
        slices: Sequence[BucketShard],
        others: Sequence[GradientBucket],
        parameters: Mapping[str, nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        shards: Shards,
        waits: CollectiveWaits,
        *,
        each_pass: bool,
        used: Callable[[FlatBuffer], None],
    ) -> None:
        super().__init__(others, parameters, optional, transport)
        self._slices, self._shards, self._each_pass, self._release_unit = tuple(slices), shards, each_pass, used
        self._waits = waits
        self._whole_buckets = [
            b for b in others if len(b.ranks) > 1 and any(name in shards.buffer_of for name in b.parameters)
        ]
        early = [not each.optional for each in self._slices]
        self._slice_launcher = BucketLauncher([each.parameters for each in self._slices], early)
        self._is_last_pass = False
        self._in_flight: deque[_PendingBucketShard] = deque()
        self._started_at: dict[str, float] = {}

    # ---- passes ------------------------------------------------------------------------------------------------------

    def begin_last_backward(self) -> None:
        super().begin_last_backward()
        self._is_last_pass = True

    def begin_backward(self) -> None:
        """Before every backward pass."""
        if self._is_last_pass or self._each_pass:
            self._slice_launcher.begin(self._launch_shard)

    def end_backward(self) -> None:
        """After every backward pass."""
        if not (self._is_last_pass or self._each_pass):
            return
        self._slice_launcher.end(self._launch_shard)
        if not self._is_last_pass:
            self._wait_in_flight(0)
        self._is_last_pass = False

    # ---- one bucket --------------------------------------------------------------------------------------------------

    def _launch_shard(self, index: int) -> None:
        each = self._slices[index]
        silent = self._transport.rank in each.bucket.zero_contributors
        grads = {name: p.grad for name, p in each.parameters.items() if p.grad is not None and not silent}
        vector = flatten_tensors(
            [grads[name] if name in grads else p.new_zeros(p.shape) for name, p in each.parameters.items()]
        )
        name = each.bucket.name
        each.with_gradient |= grads.keys()
        grads.clear()  # with each_pass the last reference to the whole gradients but for the vector
        if self._each_pass:
            for parameter in each.parameters.values():
                parameter.grad = None
            self._release_unit(each.flat_buffer)
        if name not in self._started_at:
            self._started_at[name], self.bucket_bytes[name] = time.perf_counter(), 0
        pending = self._transport.reduce_scatter(vector, each.flat_buffer.ranks, each.sizes)
        self.bucket_bytes[name] += vector.nbytes
        flags = self._start_flag_sum(each, vector) if self._is_last_pass and each.optional else None
        self._in_flight.append(_PendingBucketShard(each, pending, flags, self._is_last_pass))
        del vector
        self._wait_in_flight(1)

    def _start_flag_sum(self, each: BucketShard, like: Tensor) -> PendingTransfer:
        had = torch.tensor(
            [float(name in each.with_gradient) for name in each.optional], dtype=like.dtype, device=like.device
        )
        self.bucket_bytes[each.bucket.name] += had.nbytes
        return self._transport.all_reduce(had, each.bucket.ranks)

    def _wait_in_flight(self, most: int) -> None:
        """Wait until no more than ``most`` buckets are under way, in the order in which they left."""
        start = time.perf_counter()
        while len(self._in_flight) > most:
            self._finish_reduce(self._in_flight.popleft())
        self._waits.seconds += time.perf_counter() - start

    def _finish_reduce(self, flight: _PendingBucketShard) -> None:
        each = flight.bucket_shard
        part = flight.pending.wait()
        each.shard_sum = part if each.shard_sum is None else each.shard_sum.add_(part)
        if not flight.is_last_pass:
            return
        each.pending_flags = flight.flags
        if len(each.cross_ranks) > 1:
            # Not waited for in a pass: where another stage sums too, its pass may wait for what this one sends.
            self.bucket_bytes[each.bucket.name] += each.shard_sum.nbytes
            each.pending_cross_sum = self._transport.all_reduce(each.shard_sum, each.cross_ranks)
        else:
            self._install_gradients(each)

    def _install_gradients(self, each: BucketShard) -> None:
        """Let the pieces have their gradients."""
        total = each.shard_sum if each.pending_cross_sum is None else each.pending_cross_sum.wait()
        assert total is not None
        at = 0
        for name, parameter in each.parameters.items():
            piece = each.flat_buffer.optimizer_parts[name]
            if piece is None:
                continue
            size = piece.end - piece.begin
            own, at = total[at : at + size].view(piece.parameter.shape), at + size
            if parameter.grad is None:
                piece.parameter.grad = own
            else:  # ZeRO-1: there is memory in the whole one
                parameter.grad = parameter.grad.contiguous()
                piece.parameter.grad = piece.slice_of(parameter.grad).copy_(own)
        if each.pending_flags is not None:
            self._drop_gradients(each, each.pending_flags.wait())
        each.shard_sum = each.pending_cross_sum = each.pending_flags = None
        each.with_gradient.clear()

    def _drop_gradients(self, each: BucketShard, flags: Tensor) -> None:
        """Let parameters that nobody has a gradient of have none: the optimizer skips them."""
        for name, had in zip(each.optional, flags.tolist(), strict=True):
            piece = each.flat_buffer.optimizer_parts[name]
            if piece is not None and not had > 0:
                piece.parameter.grad = None

    # ---- after the last pass -----------------------------------------------------------------------------------------

    def wait_bucket(self, name: str) -> float:
        if name not in self._started_at:
            started = super().wait_bucket(name)
            self._shard_gradients(name)
            return started
        while any(flight.bucket_shard.bucket.name == name for flight in self._in_flight):
            self._finish_reduce(self._in_flight.popleft())
        for each in self._slices:
            if each.bucket.name == name and each.shard_sum is not None:
                self._install_gradients(each)
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
