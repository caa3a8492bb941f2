"""ZeRO in one program: its gradient reducer, and what goes on around its forward and backward passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import nn

from polylane.plan.plan import Plan
from polylane.program.program import Bucket, Program
from polylane.runtime.mesh import Waits
from polylane.runtime.stage import Around, Gates, ungated
from polylane.runtime.sync.all_reduce import Reducer
from polylane.runtime.sync.sharded import Flat, Shards
from polylane.runtime.sync.sharded_layout import crossing_group
from polylane.runtime.sync.sharded_passes import Passes
from polylane.runtime.sync.sharded_reduce import ShardedReducer, Slice
from polylane.runtime.transport.protocol import Transport


@dataclass
class ShardedAround(Around):
    """Gathers parameters for a pass, where only parts are kept; sums gradients in the backward pass."""

    reducer: ShardedReducer
    passes: Passes | None

    @contextmanager
    def forward(self) -> Iterator[None]:
        with nullcontext() if self.passes is None else self.passes.forward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        with nullcontext() if self.passes is None else self.passes.backward():
            self.reducer.begin()
            yield
            self.reducer.end()


@dataclass(frozen=True)
class Sharding:
    """How one program goes with parts.

    Attributes:
        reducer: sums the gradients of its parameters.
        around: goes around its passes.
        gates: what its stage's code calls.
    """

    reducer: Reducer
    around: Around
    gates: Gates


def sharding(
    program: Program,
    plan: Plan,
    shards: Shards,
    held: Mapping[str, nn.Parameter],
    optional: Collection[str],
    transport: Transport,
    waits: Waits,
) -> Sharding:
    """What a program needs where replicas hold parts.

    Args:
        program: of this worker, its buckets being units.
        plan: how the training is split.
        shards: what this worker holds.
        held: the parameters of its buckets.
        optional: those of them that may get no gradient at all.
        transport: between all training workers.
        waits: of the action under way, for what passes wait for.
    """
    slices, others = list[Slice](), list[Bucket]()
    for bucket in program.buckets:
        flat = shards.of.get(bucket.parameters[0])
        crossing = None if flat is None else crossing_group(plan, program.rank, bucket.ranks)
        if flat is None or crossing is None:
            others.append(bucket)
        else:
            some = tuple(name for name in bucket.parameters if name in optional)
            slices.append(Slice(bucket, flat, crossing, some))
    passes = Passes(shards, [each.flat.unit.name for each in slices], waits) if shards.hidden else None
    reducer = ShardedReducer(
        slices,
        others,
        held,
        optional,
        transport,
        shards,
        waits,
        each_pass=plan.sync.shard != "optimizer",
        used=_nothing if passes is None else passes.used,
    )
    return Sharding(reducer, ShardedAround(reducer, passes), ungated if passes is None else passes.gates)


def _nothing(flat: Flat) -> None:
    """A unit that stays whole."""
