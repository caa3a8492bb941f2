"""Connections: the channels and process groups of a plan, opened once for everything that a job runs.

tag  transport        carries                                       a group of its own because
0    main             values between stages, gradients, objects
1    statistics       batch statistics over replicas                they come inside passes, between gradient sums
2    operators        collectives of sharded operators              likewise
3    agreement        all-gather of sharded parameters (ZeRO-3)     a pass needs them while gradients are reduced
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.operators.whole_batch_counts import statistics_of
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.program.check import list_channels
from polylane.program.lower import possible_groups
from polylane.program.program import Program
from polylane.runtime.connections.byte_counters import AGREEMENT, OPERATORS, STATISTICS
from polylane.runtime.connections.shard_groups import all_shard_groups, shard_group
from polylane.runtime.progress.watched_transport import watch_transports
from polylane.runtime.span_clock import CollectiveWaits, clock_of_device
from polylane.runtime.tensor_parallel import TransportAxis, WorkerMesh
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World
from polylane.samples.once_per_batch import is_batch_start

Connect = Callable[..., Transport]
SumReplicas = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Connections:
    """The transports of one worker.

    Attributes:
        transport: main transport: values between stages, gradients, objects.
        sum_replicas: sums batch statistics over the replicas of this worker's stage; None where each has its own.
        mesh: the axes along which this worker's operators are sharded.
        extra_groups: by purpose, further transports, whose collectives are not in one order with the main one's.
    """

    transport: Transport
    sum_replicas: SumReplicas | None
    mesh: WorkerMesh
    extra_groups: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def gather_transport(self) -> Transport | None:
        """The transport that gathers parameters sharded over replicas (ZeRO-3); None where there are none."""
        return self.extra_groups.get(AGREEMENT)

    def close(self) -> None:
        """Close all transports; collective, since a worker that ends a group while another uses it may abort that."""
        self.transport.barrier()
        for transport in (*self.extra_groups.values(), self.transport):
            transport.close()


def open_connections(
    prepared: CompiledTraining, world: World, programs: Collection[Sequence[Program]], connect: Connect | None = None
) -> Connections:
    """Open all connections of a job; collective, and groups are created in the same order on every worker.

    Args:
        prepared: the compiled training that is to be run.
        world: this worker's rank among all, with device and backend.
        programs: for every objective, the programs of all workers.
        connect: makes a transport; default: chosen by where the workers are.
    """
    plan, connect = prepared.plan, choose_transport(world) if connect is None else connect
    connect = watch_transports(connect, world.progress)
    statistics = any(_syncs_statistics(partition) for partition in prepared.partitions.values())
    ranks = range(world.size)
    peers = {(rank, peer) for rank in ranks for s in range(plan.pipeline) for peer in plan.peers(rank, s)}
    replicas = sorted({plan.group(rank, ("data",)) for rank in ranks})
    # NCCL has one communicator for each pair, which takes time and memory: only pairs that exchange messages get one.
    # Elsewhere all pairs are opened that may exchange values.
    trained = {
        name for series in programs for program in series for bucket in program.buckets for name in bucket.parameters
    }
    later = {stages for name, stages in prepared.owning_stages.items() if name not in trained}
    if world.is_ordered and not later:
        pairs = sorted({pair for series in programs for pair in list_channels(series)})
    else:
        pairs = sorted((a, b) for a, b in peers if a != b)
    # Every group that any rank reduces over is declared on all ranks: torch.distributed creates groups collectively.
    buckets = [bucket.ranks for series in programs for program in series for bucket in program.buckets]
    buckets += [ranks for stages in later for ranks in possible_groups(plan, stages)]
    whole_groups = [group for rank in ranks for group in (replica_ranks(plan, rank), plan.group(rank, plan.axes))]
    columns = {column_ranks(plan, rank) for rank in ranks}
    shards = all_shard_groups(plan, programs)
    groups = {
        *columns,
        *buckets,
        *replicas,
        *whole_groups,
        *shards,
        *groups_within_replicas(plan, buckets),
        tuple(ranks),
    }
    transport = connect(world, pairs, sorted(groups))
    mesh, inner = _open_mesh(
        world, plan, connect, [prepared.main.layouts.axes(stage) for stage in range(plan.pipeline)]
    )
    transports = {} if inner is None else {OPERATORS: inner}
    if plan.sync.shard == "parameters":
        shard_groups = sorted({shard_group(plan, rank) for rank in ranks})
        transports[AGREEMENT] = connect(world, [], shard_groups, tag=3, own_groups=True)
    if plan.data == 1 or not statistics or prepared.batch_is_sharded:
        return Connections(transport, None, mesh, transports)
    # Statistics interleave with the gradients' reductions, in an order that differs between workers.
    transports[STATISTICS] = summing = connect(world, [], replicas, tag=1, own_groups=True)
    members = plan.group(world.rank, ("data",))

    def sum_replicas(tensor: Tensor) -> Tensor:
        return summing.all_reduce(tensor, members).wait()

    return Connections(transport, sum_replicas, mesh, transports)


def _syncs_statistics(partition: Partition) -> bool:
    """Return whether replicas exchange statistics of their samples: for batch normalization, or whole-batch counts."""
    code = partition.graph.code
    exchanged = (node for node in statistics_of(code.fx) if not is_batch_start(node))
    return code.has_batch_statistics or any(exchanged)


def replica_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return all ranks of the same replica, on every stage; all ranks if stages have different numbers of replicas."""
    if plan.has_uneven_replicas:
        return tuple(range(plan.workers))
    replica = plan.stage_and_replica(rank)[1]
    return tuple(worker for worker in range(plan.workers) if plan.stage_and_replica(worker)[1] == replica)


def groups_within_replicas(plan: Plan, groups: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return the ranks of the same replica in each group: those that sum the gradients of what one replica computes.

    Args:
        plan: the plan of the training.
        groups: ranks of the buckets, over all replicas.
    """
    result = set[tuple[int, ...]]()
    for ranks in set(groups):
        replicas = [plan.stage_and_replica(rank)[1] for rank in ranks]
        for replica in set(replicas):
            result.add(tuple(rank for rank, at in zip(ranks, replicas, strict=True) if at == replica))
    return {group for group in result if len(group) > 1}


def column_ranks(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the ranks at the same position of every stage's mesh, by stage; :func:`replica_ranks` if meshes differ."""
    if not plan.is_uniform:
        return replica_ranks(plan, rank)
    return tuple(plan.peers(rank, stage)[0] for stage in plan.first_chunks)


def _open_mesh(
    world: World, plan: Plan, connect: Connect, axes: Sequence[Sequence[str]]
) -> tuple[WorkerMesh, Transport | None]:
    """Open the axes along which this worker's operators are sharded, and the transport of their collectives.

    These interleave with gradients and with the values between stages, so they have channels of their own.
    """
    waits = CollectiveWaits(clock_of_device(world.device), world.progress)
    if not any(axes):
        return WorkerMesh(waits=waits), None
    stages = [plan.stage_and_replica(rank)[0] for rank in range(world.size)]
    groups = sorted({plan.group(rank, (axis,)) for rank, stage in enumerate(stages) for axis in axes[stage]})
    inner = connect(world, [], groups, tag=2, own_groups=True)
    axis_names = axes[stages[world.rank]]
    mesh_axes = {axis: TransportAxis(plan.ranks_along(world.rank, axis), inner, waits) for axis in axis_names}
    return WorkerMesh(mesh_axes, {name: axis.index for name, axis in mesh_axes.items()}, waits), inner
