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

from polylane.program.program import Bucket
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.codec import Codec, Flight, Plain, Shares
from polylane.runtime.sync.strides import laid_as
from polylane.runtime.transport.protocol import Transport


@dataclass
class _Left:
    """A bucket on its way."""

    bucket: Bucket
    flight: Flight
    started: float


class Reducer:
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
        bytes: by the name of a bucket, what this worker handed to the transport when it was last summed.
        codec: sums the gradients of replicas; its state belongs into a checkpoint.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, torch.nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        codec: Codec | None = None,
        replicas: Collection[int] = (),
    ) -> None:
        self._buckets = [bucket for bucket in buckets if len(bucket.ranks) > 1]
        self._parameters = parameters
        self._optional = frozenset(optional)
        self._transport = transport
        plain = Plain()
        self.codec: Codec = plain if codec is None else codec
        self._codecs = [self.codec if set(bucket.ranks) == set(replicas) else plain for bucket in self._buckets]
        # The user's own Python may give a gradient twice in one pass, or not at all: such buckets wait for its end.
        early = [self._optional.isdisjoint(bucket.parameters) for bucket in self._buckets]
        self._launcher = BucketLauncher([{n: parameters[n] for n in b.parameters} for b in self._buckets], early)
        self._flights: dict[str, _Left] = {}
        self._advanced = True
        self.bytes: Counter[str] = Counter()

    def arm(self) -> None:
        """Before the last backward pass of a step: a bucket leaves as soon as its gradients are complete."""
        self._advanced = False
        self.codec.begin()
        self._launcher.begin(self._launch)

    def flush(self) -> None:
        """After the last backward pass: send what is left, with zeros for parameters that got no gradient."""
        self._launcher.end(self._launch)

    def _launch(self, index: int) -> None:
        bucket = self._buckets[index]
        given = self._transport.counters.given
        flight = self._codecs[index].launch(self._shares(bucket), self._transport)
        self.bytes[bucket.name] = self._transport.counters.given - given
        self._flights[bucket.name] = _Left(bucket, flight, time.perf_counter())

    def _shares(self, bucket: Bucket) -> Shares:
        """What this worker adds to a bucket: zeros where it has no gradient, or another one has the same."""
        silent = self._transport.rank in bucket.silent
        parameters = [self._parameters[name] for name in bucket.parameters]
        grads = tuple(torch.zeros_like(p) if p.grad is None or silent else p.grad for p in parameters)
        optional = tuple(name for name in bucket.parameters if name in self._optional)
        had = [float(self._parameters[name].grad is not None and not silent) for name in optional]
        flags = torch.tensor(had, dtype=grads[0].dtype, device=grads[0].device)
        return Shares(bucket.ranks, bucket.parameters, grads, optional, flags)

    def wait(self, name: str) -> float:
        """Wait for one bucket and let the gradients be what arrived. Returns when it left (seconds on this clock)."""
        if not self._advanced:  # further rounds follow all the first ones, at every rank in the order of the buckets
            self._advanced = True
            for each, left in self._flights.items():
                given = self._transport.counters.given
                left.flight.advance()
                self.bytes[each] += self._transport.counters.given - given
        left = self._flights.pop(name)
        summed = left.flight.wait()
        for each, gradient in zip(left.bucket.parameters, summed.gradients, strict=True):
            parameter = self._parameters[each]
            parameter.grad = None if each in summed.dropped else laid_as(gradient, parameter)
        return left.started
