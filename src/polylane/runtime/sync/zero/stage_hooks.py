"""ZeRO in one program: its gradient reducer, and what goes on around its forward and backward passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import nn

from polylane.plan.plan import Plan
from polylane.program.program import GradientBucket, Program
from polylane.runtime.pipeline.stage_runner import Gates, StageHooks, no_gates
from polylane.runtime.sync.all_reduce import AllReducer
from polylane.runtime.sync.zero.all_gather_passes import GatheredPasses
from polylane.runtime.sync.zero.flat_shards import FlatBuffer, Shards
from polylane.runtime.sync.zero.reduce_scatter import BucketShard, ReduceScatterer
from polylane.runtime.sync.zero.units import cross_shard_group
from polylane.runtime.tensor_parallel import CollectiveWaits
from polylane.runtime.transport.protocol import Transport


@dataclass
class ShardedStageHooks(StageHooks):
    """Gathers parameters for a pass, where only parts are kept; sums gradients in the backward pass."""

    reducer: ReduceScatterer
    gathered_passes: GatheredPasses | None

    @contextmanager
    def forward(self) -> Iterator[None]:
        with nullcontext() if self.gathered_passes is None else self.gathered_passes.forward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        with nullcontext() if self.gathered_passes is None else self.gathered_passes.backward():
            self.reducer.begin_backward()
            yield
            self.reducer.end_backward()


@dataclass(frozen=True)
class ShardedProgram:
    """How one program goes with parts.

    Attributes:
        reducer: sums the gradients of its parameters.
        hooks: goes around its passes.
        gates: what its stage's code calls.
    """

    reducer: AllReducer
    hooks: StageHooks
    gates: Gates


def build_sharded_program(
    program: Program,
    plan: Plan,
    shards: Shards,
    held: Mapping[str, nn.Parameter],
    optional: Collection[str],
    transport: Transport,
    waits: CollectiveWaits,
) -> ShardedProgram:
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
    slices, others = list[BucketShard](), list[GradientBucket]()
    for bucket in program.buckets:
        flat = shards.buffer_of.get(bucket.parameters[0])
        crossing = None if flat is None else cross_shard_group(plan, program.rank, bucket.ranks)
        if flat is None or crossing is None:
            others.append(bucket)
        else:
            some = tuple(name for name in bucket.parameters if name in optional)
            slices.append(BucketShard(bucket, flat, crossing, some))
    passes = (
        GatheredPasses(shards, [each.flat_buffer.unit.name for each in slices], waits)
        if shards.keeps_only_shards
        else None
    )
    reducer = ReduceScatterer(
        slices,
        others,
        held,
        optional,
        transport,
        shards,
        waits,
        each_pass=plan.sync.shard != "optimizer",
        used=_keep_unit if passes is None else passes.release_reduced,
    )
    return ShardedProgram(
        reducer, ShardedStageHooks(reducer, passes), no_gates if passes is None else passes.insert_gates
    )


def _keep_unit(flat: FlatBuffer) -> None:
    """A unit that stays whole."""
