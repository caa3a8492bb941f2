"""Gradient all-reduce in buckets, while the rest of the backward pass still runs (DistributedDataParallel).

After PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2), with two differences: gradients are not
copied back, and a gradient that is large enough travels as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from polylane.program.program import GradientBucket
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.compression.compressor import (
    BucketGradients,
    GradientCompressor,
    NoCompression,
    PendingReduction,
)
from polylane.runtime.sync.gradient_strides import match_strides
from polylane.runtime.transport.protocol import Transport


@dataclass
class _LaunchedBucket:
    """A bucket on its way."""

    bucket: GradientBucket
    pending: PendingReduction
    started: float


class AllReducer:
    """Sums the gradients of one worker's parameters with those of the other workers that hold them.

    Args:
        buckets: in the order of reduction, the same on every worker.
        parameters: this worker's, whole or its parts of them, by canonical name.
        optional: parameters that may get no gradient at all in some step (the user's own Python decides): whether
            anybody had one is summed with them, so that the optimizer skips them just as on one device.
        transport: between all training workers, with a group for every bucket.
        codec: how the sums over the replicas of one stage are made; this worker's own, for it may remember. Reducers of
            the same parameters that work in turns share one. Default: plainly.
        replicas: the ranks that hold the same parts of the same stage as this worker does. A bucket that others sum as
            well (ranks along an operator axis, of which each has a summand; stages that share tied weights) is no sum
            of alike gradients over samples, and is always summed plainly.

    Attributes:
        bucket_bytes: by the name of a bucket, what this worker handed to the transport when it was last summed.
        compressor: sums the gradients of replicas; its state belongs into a checkpoint.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        parameters: Mapping[str, torch.nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        codec: GradientCompressor | None = None,
        replicas: Collection[int] = (),
    ) -> None:
        self._buckets = [bucket for bucket in buckets if len(bucket.ranks) > 1]
        self._parameters = parameters
        self._optional = frozenset(optional)
        self._transport = transport
        plain = NoCompression()
        self.compressor: GradientCompressor = plain if codec is None else codec
        self._compressors = [
            self.compressor if set(bucket.ranks) == set(replicas) else plain for bucket in self._buckets
        ]
        # The user's own Python may give a gradient twice in one pass, or not at all: such buckets wait for its end.
        early = [self._optional.isdisjoint(bucket.parameters) for bucket in self._buckets]
        self._launcher = BucketLauncher([{n: parameters[n] for n in b.parameters} for b in self._buckets], early)
        self._launched: dict[str, _LaunchedBucket] = {}
        self._has_advanced = True
        self.bucket_bytes: Counter[str] = Counter()

    def begin_last_backward(self) -> None:
        """Before the last backward pass of a step: a bucket leaves as soon as its gradients are complete."""
        self._has_advanced = False
        self.compressor.begin_step()
        self._launcher.begin(self._launch_bucket)

    def launch_remaining(self) -> None:
        """After the last backward pass: send what is left, with zeros for parameters that got no gradient."""
        self._launcher.end(self._launch_bucket)

    def _launch_bucket(self, index: int) -> None:
        bucket = self._buckets[index]
        given = self._transport.counters.given
        flight = self._compressors[index].launch_sum(self._bucket_gradients(bucket), self._transport)
        self.bucket_bytes[bucket.name] = self._transport.counters.given - given
        self._launched[bucket.name] = _LaunchedBucket(bucket, flight, time.perf_counter())

    def _bucket_gradients(self, bucket: GradientBucket) -> BucketGradients:
        """What this worker adds to a bucket: zeros where it has no gradient, or another one has the same."""
        silent = self._transport.rank in bucket.zero_contributors
        parameters = [self._parameters[name] for name in bucket.parameters]
        grads = tuple(torch.zeros_like(p) if p.grad is None or silent else p.grad for p in parameters)
        optional = tuple(name for name in bucket.parameters if name in self._optional)
        had = [float(self._parameters[name].grad is not None and not silent) for name in optional]
        flags = torch.tensor(had, dtype=grads[0].dtype, device=grads[0].device)
        return BucketGradients(bucket.ranks, bucket.parameters, grads, optional, flags)

    def wait_bucket(self, name: str) -> float:
        """Wait for one bucket and let the gradients be what arrived. Returns when it left (seconds on this clock)."""
        if (
            not self._has_advanced
        ):  # further rounds follow all the first ones, at every rank in the order of the buckets
            self._has_advanced = True
            for each, left in self._launched.items():
                given = self._transport.counters.given
                left.pending.start_next_round()
                self.bucket_bytes[each] += self._transport.counters.given - given
        left = self._launched.pop(name)
        summed = left.pending.wait()
        for each, gradient in zip(left.bucket.parameters, summed.gradients, strict=True):
            parameter = self._parameters[each]
            parameter.grad = None if each in summed.without_gradient else match_strides(gradient, parameter)
        return left.started
