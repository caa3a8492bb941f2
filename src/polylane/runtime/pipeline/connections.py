"""Which workers talk: the channels and groups of a plan, opened once for all that a job runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.graph.operators.whole_batch_counts import statistics_of
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.program.check import list_channels
from polylane.program.program import Program
from polylane.runtime.pipeline.byte_counters import AGREEMENT, OPERATORS, STATISTICS
from polylane.runtime.sync.zero.units import all_shard_groups, shard_group
from polylane.runtime.tensor_parallel import CollectiveWaits, TransportAxis, WorkerMesh
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World

Connect = Callable[..., Transport]
SumReplicas = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Connections:
    """What a worker reaches the others by.

    Attributes:
        transport: values between stages, gradients, objects.
        sum_replicas: sums batch statistics over the replicas of this worker's stage; None where each has its own.
        mesh: the axes along which operators are split.
        extra_groups: further transports, whose collectives come in another order, by what they are for.
    """

    transport: Transport
    sum_replicas: SumReplicas | None
    mesh: WorkerMesh
    extra_groups: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def gather_transport(self) -> Transport | None:
        """For parameters that replicas hold parts of only; None where there are none."""
        return self.extra_groups.get(AGREEMENT)

    def close(self) -> None:
        """Leave together with all other workers: one that ends a group while another still talks may abort it."""
        self.transport.barrier()
        for transport in (*self.extra_groups.values(), self.transport):
            transport.close()


def check_world_size(plan: Plan, world: World) -> None:
    """See that there are as many workers as a plan takes.

    Raises:
        PolylaneError: there are not.
    """
    if world.size != plan.processes:
        raise PolylaneError(f"the plan takes {plan.processes} workers ({plan.spec}), there are {world.size}")


def open_connections(
    prepared: CompiledTraining, world: World, programs: Collection[Sequence[Program]], connect: Connect | None = None
) -> Connections:
    """Open all that a job talks by.

    Args:
        prepared: the training.
        world: this worker among all.
        programs: of all workers, for every objective.
        connect: makes a transport; default: what suits where the workers are.
    """
    plan, connect = prepared.plan, choose_transport(world) if connect is None else connect
    statistics = any(_syncs_statistics(partition) for partition in prepared.partitions.values())
    ranks = range(world.size)
    peers = {(rank, peer) for rank in ranks for s in range(plan.pipeline) for peer in plan.peers(rank, s)}
    replicas = sorted({plan.group(rank, ("data",)) for rank in ranks})
    if world.backend == "nccl":  # one communicator for each pair that talks
        pairs = sorted({pair for each in programs for pair in list_channels(each)})
    else:
        pairs = sorted((a, b) for a, b in peers if a != b)
    buckets = [bucket.ranks for each in programs for program in each for bucket in program.buckets]
    whole = [each for rank in ranks for each in (replica_ranks(plan, rank), plan.group(rank, plan.axes))]
    columns = {column_ranks(plan, rank) for rank in ranks}
    shards = all_shard_groups(plan, programs)
    transport = connect(world, pairs, sorted({*columns, *buckets, *replicas, *whole, *shards, tuple(ranks)}))
    mesh, inner = _open_mesh(world, plan, connect, [prepared.axes(stage) for stage in range(plan.pipeline)])
    apart = {} if inner is None else {OPERATORS: inner}
    if plan.sync.shard == "parameters":  # gathered whenever a pass needs them, whatever else is under way
        groups = sorted({shard_group(plan, rank) for rank in ranks})
        apart[AGREEMENT] = connect(world, [], groups, tag=3, own_groups=True)
    if plan.data == 1 or not statistics or prepared.batch_is_sharded:
        return Connections(transport, None, mesh, apart)
    # Statistics interleave with the gradients' own reductions, so they have groups of their own.
    apart[STATISTICS] = summing = connect(world, [], replicas, tag=1, own_groups=True)
    members = plan.group(world.rank, ("data",))

    def sum_replicas(tensor: Tensor) -> Tensor:
        return summing.all_reduce(tensor, members).wait()

    return Connections(transport, sum_replicas, mesh, apart)


def _syncs_statistics(partition: Partition) -> bool:
    """Whether replicas tell each other of their samples: for batch normalization, or for counts of the whole batch."""
    code = partition.graph.code
    return code.has_batch_statistics or bool(statistics_of(code.fx))


def replica_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """All ranks of the same replica: every stage, and every place in its mesh.

    All there are where stages have different numbers of replicas.
    """
    if plan.resplits_batch:
        return tuple(range(plan.workers))
    replica = plan.stage_and_replica(rank)[1]
    return tuple(other for other in range(plan.workers) if plan.stage_and_replica(other)[1] == replica)


def column_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks with the same place in the meshes of all stages, by stage; :func:`replica_ranks` where meshes
    differ.
    """
    if not plan.is_uniform:
        return replica_ranks(plan, rank)
    return tuple(plan.peers(rank, stage)[0] for stage in range(plan.pipeline))


def _open_mesh(
    world: World, plan: Plan, connect: Connect, axes: Sequence[Sequence[str]]
) -> tuple[WorkerMesh, Transport | None]:
    """The axes along which this worker's operators are split, and what carries their collectives.

    They interleave with gradients and with the values between stages, so they have channels of their own.
    """
    if not any(axes):
        return WorkerMesh(), None
    stages = [plan.stage_and_replica(rank)[0] for rank in range(world.size)]
    groups = sorted({plan.group(rank, (axis,)) for rank, stage in enumerate(stages) for axis in axes[stage]})
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    inner, waits = connect(world, pairs, groups, tag=2, own_groups=True), CollectiveWaits()
    mine = axes[stages[world.rank]]
    own = {axis: TransportAxis(plan.ranks_along(world.rank, axis), inner, waits) for axis in mine}
    return WorkerMesh(own, {name: axis.index for name, axis in own.items()}, waits), inner
