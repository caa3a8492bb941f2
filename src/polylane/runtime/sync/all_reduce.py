"""Gradients summed over all who hold a parameter, bucket by bucket, while the rest of the backward pass still runs.

The idea is that of PyTorch's DistributedDataParallel (Li et al., VLDB'20, section 3.2), with two differences:
gradients are not copied back, and a gradient that is large enough travels as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from polylane.program.program import Bucket
from polylane.runtime.transport.protocol import Pending, Transport


@dataclass
class _Flight:
    """A bucket on its way."""

    pending: Pending
    flat: Tensor | None  # None when the one gradient itself travels
    flags: int  # how many elements at the end say who had a gradient
    started: float


class Reducer:
    """Sums the gradients of one worker's parameters with those of the other workers that hold them.

    Args:
        buckets: in the order of reduction, the same on every worker.
        parameters: by canonical name.
        optional: parameters that may get no gradient at all in some step (the user's own Python decides): whether
            anybody had one is summed with them, so that the optimizer skips them just as on one device.

    Attributes:
        bytes: by the name of a bucket, what this worker handed to the transport when it last left.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Mapping[str, torch.nn.Parameter],
        optional: Collection[str],
        transport: Transport,
    ) -> None:
        self._buckets = [bucket for bucket in buckets if len(bucket.ranks) > 1]
        self._parameters = parameters
        self._optional = frozenset(optional)
        self._transport = transport
        self._of = {name: i for i, bucket in enumerate(self._buckets) for name in bucket.parameters}
        # The user's own Python may give a gradient twice in one pass, or not at all: such buckets wait for its end.
        self._sure = [self._optional.isdisjoint(bucket.parameters) for bucket in self._buckets]
        self._waiting: list[set[str]] = []
        self._next = 0
        self._flights: dict[str, _Flight] = {}
        self.bytes: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []

    def arm(self) -> None:
        """Before the last backward pass of a step: a bucket leaves as soon as its gradients are complete."""
        self._waiting = [set(bucket.parameters) for bucket in self._buckets]
        self._next = 0
        for name in self._of:
            hook = self._parameters[name].register_post_accumulate_grad_hook(self._finisher(name))
            self._hooks.append(hook)

    def _finisher(self, name: str):  # type: ignore[no-untyped-def]
        def finished(_: Tensor) -> None:
            self._waiting[self._of[name]].discard(name)
            # In order, always: the other workers' gradients may be complete in another one.
            while self._next < len(self._buckets) and not self._waiting[self._next] and self._sure[self._next]:
                self._launch(self._next)

        return finished

    def flush(self) -> None:
        """After the last backward pass: send what is left, with zeros for parameters that got no gradient."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._next < len(self._buckets):
            self._launch(self._next)
        self._waiting = []

    def _launch(self, index: int) -> None:
        self._next = index + 1
        bucket = self._buckets[index]
        parameters = [self._parameters[name] for name in bucket.parameters]
        optional = [name for name in bucket.parameters if name in self._optional]
        silent = self._transport.rank in bucket.silent
        grads = [torch.zeros_like(p) if p.grad is None or silent else p.grad for p in parameters]
        if len(grads) == 1 and not optional and grads[0].is_contiguous():
            parameters[0].grad = grads[0]
            flat, wire = None, grads[0]
        else:
            had = [float(self._parameters[name].grad is not None and not silent) for name in optional]
            flags = [torch.tensor(had, dtype=grads[0].dtype, device=grads[0].device)] if had else []
            flat = wire = torch.cat([*(g.reshape(-1) for g in grads), *flags])
        pending = self._transport.all_reduce(wire, bucket.ranks)
        self.bytes[bucket.name] = wire.nbytes
        self._flights[bucket.name] = _Flight(pending, flat, len(optional), time.perf_counter())

    def wait(self, name: str) -> float:
        """Wait for one bucket and let the gradients be what arrived. Returns when it left (seconds on this clock)."""
        flight = self._flights.pop(name)
        flight.pending.wait()
        bucket = next(bucket for bucket in self._buckets if bucket.name == name)
        if flight.flat is not None:
            self._unpack(bucket, flight.flat, flight.flags)
        return flight.started

    def _unpack(self, bucket: Bucket, flat: Tensor, flags: int) -> None:
        at = 0
        had = dict(
            zip(
                [n for n in bucket.parameters if n in self._optional],
                flat[flat.numel() - flags :].tolist(),
                strict=True,
            )
        )
        for name in bucket.parameters:
            parameter = self._parameters[name]
            piece = flat[at : at + parameter.numel()].view_as(parameter)
            parameter.grad = piece if had.get(name, 1.0) > 0 else None
            at += parameter.numel()
