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

from polylane.program.program import Bucket
from polylane.runtime.mesh import Waits
from polylane.runtime.sync.all_reduce import Reducer
from polylane.runtime.sync.bucket_launcher import BucketLauncher
from polylane.runtime.sync.flat_packing import flatten_tensors
from polylane.runtime.sync.sharded import Flat, Shards
from polylane.runtime.transport.protocol import Pending, Transport


@dataclass
class Slice:
    """What one worker has of one bucket's sum.

    Attributes:
        bucket: a unit's gradients, or some of them.
        flat: the unit whose parameters the bucket has.
        crossing: the ranks that sum the same part for shard groups of their own, with this one.
        optional: those of the parameters that may get no gradient at all.
        sizes: elements of each rank's part of the bucket.
        parameters: the bucket's by name, in their order in the unit.
        had: those of which this worker had a gradient in the step.
        total: this worker's part of the sum over its shard group, as far as it has come in the step.
        crossed: its sum over ``crossing``, under way.
        flags: whether anybody had a gradient of each of ``optional``, under way.
    """

    bucket: Bucket
    flat: Flat
    crossing: tuple[int, ...]
    optional: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    had: set[str] = field(default_factory=set)
    total: Tensor | None = None
    crossed: Pending | None = None
    flags: Pending | None = None

    def __post_init__(self) -> None:
        flat, own = self.flat, [i for i, n in enumerate(self.flat.unit.parameters) if n in self.bucket.parameters]
        self.parameters = {flat.unit.parameters[i]: flat.parameters[i] for i in own}
        spans = [flat.spans[i] for i in own]
        self.sizes = tuple(sum(max(0, min(b, end) - max(a, begin)) for a, b in spans) for begin, end in flat.bounds)


@dataclass
class _Flight:
    slice: Slice
    pending: Pending
    flags: Pending | None
    last: bool


class ShardedReducer(Reducer):
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
        slices: Sequence[Slice],
        others: Sequence[Bucket],
        parameters: Mapping[str, nn.Parameter],
        optional: Collection[str],
        transport: Transport,
        shards: Shards,
        waits: Waits,
        *,
        each_pass: bool,
        used: Callable[[Flat], None],
    ) -> None:
        super().__init__(others, parameters, optional, transport)
        self._slices, self._shards, self._each_pass, self._used = tuple(slices), shards, each_pass, used
        self._waits = waits
        self._wholly = [b for b in others if len(b.ranks) > 1 and any(name in shards.of for name in b.parameters)]
        early = [not each.optional for each in self._slices]
        self._slice_launcher = BucketLauncher([each.parameters for each in self._slices], early)
        self._last = False
        self._sent: deque[_Flight] = deque()
        self._since: dict[str, float] = {}

    # ---- passes ------------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        super().arm()
        self._last = True

    def begin(self) -> None:
        """Before every backward pass."""
        if self._last or self._each_pass:
            self._slice_launcher.begin(self._leave)

    def end(self) -> None:
        """After every backward pass."""
        if not (self._last or self._each_pass):
            return
        self._slice_launcher.end(self._leave)
        if not self._last:
            self._land(0)
        self._last = False

    # ---- one bucket --------------------------------------------------------------------------------------------------

    def _leave(self, index: int) -> None:
        each = self._slices[index]
        silent = self._transport.rank in each.bucket.silent
        grads = {name: p.grad for name, p in each.parameters.items() if p.grad is not None and not silent}
        vector = flatten_tensors(
            [grads[name] if name in grads else p.new_zeros(p.shape) for name, p in each.parameters.items()]
        )
        name = each.bucket.name
        each.had |= grads.keys()
        grads.clear()  # with each_pass the last reference to the whole gradients but for the vector
        if self._each_pass:
            for parameter in each.parameters.values():
                parameter.grad = None
            self._used(each.flat)
        if name not in self._since:
            self._since[name], self.bytes[name] = time.perf_counter(), 0
        pending = self._transport.reduce_scatter(vector, each.flat.ranks, each.sizes)
        self.bytes[name] += vector.nbytes
        flags = self._flags(each, vector) if self._last and each.optional else None
        self._sent.append(_Flight(each, pending, flags, self._last))
        del vector
        self._land(1)

    def _flags(self, each: Slice, like: Tensor) -> Pending:
        had = torch.tensor([float(name in each.had) for name in each.optional], dtype=like.dtype, device=like.device)
        self.bytes[each.bucket.name] += had.nbytes
        return self._transport.all_reduce(had, each.bucket.ranks)

    def _land(self, most: int) -> None:
        """Wait until no more than ``most`` buckets are under way, in the order in which they left."""
        start = time.perf_counter()
        while len(self._sent) > most:
            self._take(self._sent.popleft())
        self._waits.seconds += time.perf_counter() - start

    def _take(self, flight: _Flight) -> None:
        each = flight.slice
        part = flight.pending.wait()
        each.total = part if each.total is None else each.total.add_(part)
        if not flight.last:
            return
        each.flags = flight.flags
        if len(each.crossing) > 1:
            # Not waited for in a pass: where another stage sums too, its pass may wait for what this one sends.
            self.bytes[each.bucket.name] += each.total.nbytes
            each.crossed = self._transport.all_reduce(each.total, each.crossing)
        else:
            self._settle(each)

    def _settle(self, each: Slice) -> None:
        """Let the pieces have their gradients."""
        total = each.total if each.crossed is None else each.crossed.wait()
        assert total is not None
        at = 0
        for name, parameter in each.parameters.items():
            piece = each.flat.pieces[name]
            if piece is None:
                continue
            size = piece.end - piece.begin
            own, at = total[at : at + size].view(piece.parameter.shape), at + size
            if parameter.grad is None:
                piece.parameter.grad = own
            else:  # ZeRO-1: there is memory in the whole one
                parameter.grad = parameter.grad.contiguous()
                piece.parameter.grad = piece.of(parameter.grad).copy_(own)
        if each.flags is not None:
            self._drop(each, each.flags.wait())
        each.total = each.crossed = each.flags = None
        each.had.clear()

    def _drop(self, each: Slice, flags: Tensor) -> None:
        """Let parameters that nobody has a gradient of have none: the optimizer skips them."""
        for name, had in zip(each.optional, flags.tolist(), strict=True):
            piece = each.flat.pieces[name]
            if piece is not None and not had > 0:
                piece.parameter.grad = None

    # ---- after the last pass -----------------------------------------------------------------------------------------

    def wait(self, name: str) -> float:
        if name not in self._since:
            started = super().wait(name)
            self._cut_whole(name)
            return started
        while any(flight.slice.bucket.name == name for flight in self._sent):
            self._take(self._sent.popleft())
        for each in self._slices:
            if each.bucket.name == name and each.total is not None:
                self._settle(each)
        return self._since.pop(name)

    def _cut_whole(self, name: str) -> None:
        for parameter_name in next((b.parameters for b in self._wholly if b.name == name), ()):
            if (flat := self._shards.of.get(parameter_name)) is None:
                continue
            piece, parameter = flat.pieces[parameter_name], self._parameters[parameter_name]
            if piece is not None and parameter.grad is not None:
                piece.parameter.grad = piece.of(parameter.grad)
            if self._each_pass:
                parameter.grad = None
