"""ZeRO hooks of one program: its gradient reducer, and the gathers around its forward and backward passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from polylane.plan.plan import Plan
from polylane.program.program import GradientBucket, Program
from polylane.runtime.connections.shard_groups import cross_shard_group
from polylane.runtime.parameters.zero_shards import Shards
from polylane.runtime.span_clock import CollectiveWaits
from polylane.runtime.stage_hooks import StageHooks
from polylane.runtime.sync.zero.all_gather_passes import GatheredPasses
from polylane.runtime.sync.zero.reduce_scatter import BucketShard, ReduceScatterer
from polylane.runtime.transport.protocol import Transport


@dataclass
class ShardedStageHooks(StageHooks):
    """Gathers parameters for a pass (ZeRO-3), and reduces gradients in the backward pass.

    Attributes:
        reducer: reduces the gradients of the program's parameters.
        gathers: gather and release the program's units; they do nothing where parameters stay full.
    """

    reducer: ReduceScatterer
    gathers: StageHooks

    def cast_weights(self, graph: fx.Graph) -> None:
        self.gathers.cast_weights(graph)

    def insert_gates(self, graph: fx.Graph) -> AbstractContextManager[None]:
        return self.gathers.insert_gates(graph)

    def forward(self) -> AbstractContextManager[None]:
        return self.gathers.forward()

    def pack_saved(self, tensor: Tensor) -> Any:
        return self.gathers.pack_saved(tensor)

    def unpack_saved(self, saved_value: Any) -> Tensor:
        return self.gathers.unpack_saved(saved_value)

    @contextmanager
    def backward(self) -> Iterator[None]:
        with self.gathers.backward():
            # Inside the gathers: the reducer releases units whose gradients it has sent.
            self.reducer.begin_backward()
            yield
            self.reducer.end_backward()

    @contextmanager
    def backward_weight(self) -> Iterator[None]:
        # Gradients of the first half are reduced with those of the second: a bucket may have both.
        self.reducer.begin_backward()
        yield
        self.reducer.end_backward()


def build_sharded_program(
    program: Program,
    plan: Plan,
    shards: Shards,
    parameters: Mapping[str, nn.Parameter],
    optional: Collection[str],
    transport: Transport,
    waits: CollectiveWaits,
    read_otherwise: Collection[str] = (),
) -> ShardedStageHooks:
    """Build the reducer and the hooks of a program whose parameters are sharded over replicas.

    Args:
        program: program of this worker, with one bucket or more for each shard unit.
        plan: the parallelization plan of the training.
        shards: ZeRO shards of this worker.
        parameters: the parameters of the program's buckets, by canonical name.
        optional: names of parameters that may get no gradient in some step.
        transport: connects all training workers; the shard groups are among its groups.
        waits: counter to which time and bytes of the running action are added.
        read_otherwise: names of parameters that the program's graph reads in their own dtype.
    """
    slices, other_buckets = list[BucketShard](), list[GradientBucket]()
    for bucket in program.buckets:
        # A bucket is part of one unit: its first parameter tells which.
        flat = shards.buffer_of.get(bucket.parameters[0])
        crossing = None if flat is None else cross_shard_group(plan, program.rank, bucket.ranks)
        if flat is None or crossing is None:
            other_buckets.append(bucket)
        else:
            optional_names = tuple(name for name in bucket.parameters if name in optional)
            slices.append(BucketShard(bucket, flat, crossing, optional_names))
    passes = None
    if shards.keeps_only_shards:
        passes = GatheredPasses(
            shards, [bucket_shard.flat_buffer.unit.name for bucket_shard in slices], waits, read_otherwise
        )
    reducer = ReduceScatterer(
        slices,
        other_buckets,
        parameters,
        optional,
        transport,
        shards,
        waits,
        each_pass=plan.sync.shard != "optimizer",
        passes=passes,
    )
    return ShardedStageHooks(reducer, passes or StageHooks())
