"""Bucketed gradient all-reduce that overlaps with the backward pass, as in PyTorch's DistributedDataParallel.

Li et al., VLDB 2020, section 3.2, with two differences: summed gradients are not copied back out of the bucket, and a
bucket of one contiguous gradient is sent from the gradient's own memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.sparse_gradients import densify
from polylane.program.program import GradientBucket, Program
from polylane.runtime.span_clock import HostClock, Mark, SpanClock
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.compression.compressor import (
    BucketGradients,
    GradientCompressor,
    PendingReduction,
)
from polylane.runtime.sync.sparse_exchange import launch_sparse_sum
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.transport.staged import HostStaging
from polylane.schedule.action import WEIGHT_PASSES


@dataclass
class _LaunchedBucket:
    """A bucket whose sum is pending; ``started`` is a mark of the worker's clock."""

    bucket: GradientBucket
    pending: PendingReduction
    started: Mark


class AllReducer:
    """All-reduces the gradients of one worker's parameters over the workers that hold them.

    Args:
        buckets: gradient buckets in the order of reduction, the same on every worker.
        parameters: this worker's parameters, or its tensor-parallel shards, by canonical name.
        optional: names of parameters that may get no gradient in some step (the user's own Python decides). A flag for
            each is summed with the bucket, so that the optimizer skips a parameter without any gradient as on one
            device.
        transport: connects all training workers, with a declared group for every bucket.
        codec: gradient compressor for the sums over replicas, owned by this worker because it may keep residuals;
            reducers of the same parameters that run in turns share one. Default: no compression.
        replicas: the ranks that hold the same shards of the same stage as this worker. A bucket that other ranks sum
            too (partial sums along an operator axis, weights tied between stages) is never compressed.
        clock: reads when a bucket was launched; default: the host's.
        late: number of buckets, the last ones, that are launched behind all messages of the step: their ranks end their
            last backward passes one after the other, and a launch that waits for the others would hold up the message
            that these wait for.

    Attributes:
        bucket_names: names of the buckets that it sums, in the order of reduction.
        bucket_bytes: bytes that this worker handed to the transport for a bucket's latest sum, by the bucket's name.
        compressor: sums the gradients of replicas; it may keep residuals from step to step.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        parameters: Mapping[str, torch.nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        codec: GradientCompressor | None = None,
        replicas: Collection[int] = (),
        clock: SpanClock | None = None,
        late: int = 0,
    ) -> None:
        self._buckets = [bucket for bucket in buckets if len(bucket.ranks) > 1]
        self.bucket_names = tuple(bucket.name for bucket in self._buckets)
        self._parameters = parameters
        self._optional = frozenset(optional)
        self._transport = transport
        self._clock = HostClock() if clock is None else clock
        plain = GradientCompressor()
        self.compressor = plain if codec is None else codec
        self._compressors = [
            self.compressor if set(bucket.ranks) == set(replicas) else plain for bucket in self._buckets
        ]
        # The user's own Python may accumulate a gradient twice in a pass, or never: the post-accumulate hook does not
        # prove such a bucket complete, so it is launched at the end of the pass.
        early = [self._optional.isdisjoint(bucket.parameters) for bucket in self._buckets]
        self._launcher = BucketLauncher([{n: parameters[n] for n in b.parameters} for b in self._buckets], early, late)
        self._launched: dict[str, _LaunchedBucket] = {}
        self._has_advanced = True
        self.bucket_bytes: Counter[str] = Counter()

    def begin_last_backward(self) -> None:
        """Prepare the last backward pass of a step: each bucket is launched once its gradients are complete."""
        self._has_advanced = False
        self.compressor.begin_step()
        self._launcher.begin(self._launch_bucket)

    def launch_remaining(self) -> None:
        """Launch the remaining buckets but the late ones after the last backward pass, zeros for missing gradients."""
        self._launcher.end(self._launch_bucket)

    def _launch_bucket(self, index: int) -> None:
        bucket = self._buckets[index]
        # The difference of a counter: only the compressor knows how many bytes it hands over.
        bytes_before = self._transport.counters.given
        if bucket.is_sparse:
            flight: PendingReduction = self._launch_sparse_bucket(bucket)
        else:
            flight = self._compressors[index].launch_sum(self._bucket_gradients(bucket), self._transport)
        self.bucket_bytes[bucket.name] = self._transport.counters.given - bytes_before
        self._launched[bucket.name] = _LaunchedBucket(bucket, flight, self._clock.mark())

    def _launch_sparse_bucket(self, bucket: GradientBucket) -> PendingReduction:
        (name,) = bucket.parameters
        table = self._parameters[name]
        gradient = None if self._transport.rank in bucket.zero_contributors else table.grad
        return launch_sparse_sum(name, table, gradient, bucket.ranks, self._transport)

    def _bucket_gradients(self, bucket: GradientBucket) -> BucketGradients:
        """Return this worker's contribution to a bucket: zeros where it has no gradient, or another rank gives it."""
        silent = self._transport.rank in bucket.zero_contributors
        parameters = [self._parameters[name] for name in bucket.parameters]
        optional = tuple(name for name in bucket.parameters if name in self._optional)
        for name in optional:
            if (gradient := self._parameters[name].grad) is not None and gradient.is_sparse:
                raise PolylaneError(
                    f"{name} gets a sparse gradient in Python code of its own that could not be captured, so that "
                    "replicas cannot add it up: make the embedding with sparse=False"
                )
        # Of a table that is also read otherwise one rank may have the sparse summand of a dense gradient.
        grads = tuple(
            torch.zeros_like(p) if silent or (gradient := p.grad) is None else densify(gradient) for p in parameters
        )
        # A rank that contributes zeros also reports no gradient: another rank's flag stands for both.
        had = [float(self._parameters[name].grad is not None and not silent) for name in optional]
        flags = HostStaging(grads[0].device).to_device(torch.tensor(had, dtype=grads[0].dtype))
        return BucketGradients(bucket.ranks, bucket.parameters, grads, optional, flags)

    def wait_bucket(self, name: str) -> Mark:
        """Wait for one bucket, install its sums as gradients, and return the mark of its launch."""
        if not self._has_advanced:
            # Second rounds start only after all first ones, in the order of the buckets: so all ranks issue all
            # collectives in one order, whichever of them complete first.
            self._has_advanced = True
            self._launcher.launch_late(self._launch_bucket)
            for key, launch in self._launched.items():
                bytes_before = self._transport.counters.given
                launch.pending.start_next_round()
                self.bucket_bytes[key] += self._transport.counters.given - bytes_before
        launch = self._launched.pop(name)
        summed = launch.pending.wait()
        for key, gradient in zip(launch.bucket.parameters, summed.gradients, strict=True):
            parameter = self._parameters[key]
            parameter.grad = None if key in summed.without_gradient else match_strides(gradient, parameter)
        return launch.started


def launch_zeros(program: Program, reducers: Mapping[int, AllReducer]) -> None:
    """Take part in the sums of gradients of a batch of which this replica has no microbatch.

    Args:
        program: the worker's program, whose sums are launched.
        reducers: sum its gradients, by the stage whose last backward pass completes them.
    """
    ends = {action.stage: index for index, action in enumerate(program.actions) if action.kind in WEIGHT_PASSES}
    # In the order in which the other replicas' last backward passes launch them.
    for stage in sorted(reducers, key=lambda stage: ends.get(stage, -1)):
        reducers[stage].begin_last_backward()
        reducers[stage].launch_remaining()


def match_strides(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with the strides of its parameter; the gradient itself if it has them already.

    Autograd does the same, and torch's fused optimizers walk over the memory of both in parallel: a contiguous gradient
    of a channels-last weight would be added to the wrong elements, without an error (torch 2.13, CPU).
    """
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
