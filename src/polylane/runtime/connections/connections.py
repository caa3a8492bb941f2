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
from polylane.runtime.connections.byte_counters import AGREEMENT, OPERATORS, STAGES, STATISTICS
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


@dataclass(frozen=True)
class DeclaredTransport:
    """What one transport of a plan is opened for.

    Attributes:
        tag: the transport's number in the table above.
        groups: ranks of all its collectives, sorted; of those of one rank nothing is opened.
        channels: directed pairs of ranks between which messages are sent, sorted.
        exchanges: whether its groups run all-to-alls.
    """

    tag: int
    groups: Sequence[tuple[int, ...]]
    channels: Sequence[tuple[int, int]] = ()
    exchanges: bool = False

    @property
    def own_groups(self) -> bool:
        """Whether the world's own group is left to other transports."""
        return self.tag != 0


def declare_transports(
    prepared: CompiledTraining, programs: Collection[Sequence[Program]], is_ordered: bool
) -> dict[str, DeclaredTransport]:
    """Return the transports of a job by purpose, in the order in which they are opened; the same for every worker.

    Args:
        prepared: the compiled training that is to be run.
        programs: for every objective, the programs of all workers.
        is_ordered: whether there is a communicator for each channel, see :class:`.protocol.Transport`.
    """
    plan = prepared.plan
    ranks = range(plan.workers)
    peers = {(rank, peer) for rank in ranks for s in range(plan.pipeline) for peer in plan.peers(rank, s)}
    replicas = sorted({plan.group(rank, ("data",)) for rank in ranks})
    # NCCL has one communicator for each pair, which takes time and memory: only pairs that exchange messages get one.
    # Elsewhere all pairs are opened that may exchange values.
    trained = {
        name for series in programs for program in series for bucket in program.buckets for name in bucket.parameters
    }
    later = {stages for name, stages in prepared.owning_stages.items() if name not in trained}
    if is_ordered and not later:
        pairs = sorted({pair for series in programs for pair in list_channels(series)})
    else:
        pairs = sorted((a, b) for a, b in peers if a != b)
    # Every group that any rank reduces over is declared on all ranks: torch.distributed creates groups collectively.
    buckets = [bucket.ranks for series in programs for program in series for bucket in program.buckets]
    buckets += [ranks for stages in later for ranks in possible_groups(plan, stages)]
    groups = {
        *(column_ranks(plan, rank) for rank in ranks),
        *buckets,
        *replicas,
        *(group for rank in ranks for group in (replica_ranks(plan, rank), plan.group(rank, plan.axes))),
        *all_shard_groups(plan, programs),
        *groups_within_replicas(plan, buckets),
        tuple(ranks),
    }
    # Shorter gradients are exchanged, and each rank adds up its part.
    transports = {STAGES: DeclaredTransport(0, sorted(groups), pairs, exchanges=plan.sync.wire != "same")}
    axes = [prepared.main.layouts.axes(stage) for stage in range(plan.pipeline)]
    if any(axes):
        stages = [plan.stage_and_replica(rank)[0] for rank in ranks]
        lines = sorted({plan.group(rank, (axis,)) for rank, stage in enumerate(stages) for axis in axes[stage]})
        transports[OPERATORS] = DeclaredTransport(2, lines, exchanges=True)
    if plan.sync.shard == "parameters":
        transports[AGREEMENT] = DeclaredTransport(3, sorted({shard_group(plan, rank) for rank in ranks}))
    statistics = any(_syncs_statistics(partition) for partition in prepared.partitions.values())
    if plan.data > 1 and statistics and not prepared.batch_is_sharded:
        # Statistics interleave with the gradients' reductions, in an order that differs between workers.
        transports[STATISTICS] = DeclaredTransport(1, replicas)
    return transports


def count_communicators(transports: Collection[DeclaredTransport], workers: int) -> tuple[int, ...]:
    """Return how many communicators each worker has over NCCL: one for each of its channels and groups.

    Args:
        transports: all transports of a job.
        workers: number of its workers.
    """
    opened = [ranks for t in transports for ranks in (*t.channels, *t.groups) if len(ranks) > 1]
    return tuple(sum(rank in ranks for ranks in opened) for rank in range(workers))


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
    transports = {
        purpose: connect(
            world, entry.channels, entry.groups, tag=entry.tag, own_groups=entry.own_groups, exchanges=entry.exchanges
        )
        for purpose, entry in declare_transports(prepared, programs, world.is_ordered).items()
    }
    mesh = _make_mesh(world, plan, transports.get(OPERATORS), prepared)
    main = transports.pop(STAGES)
    if (summing := transports.get(STATISTICS)) is None:
        return Connections(main, None, mesh, transports)
    members = plan.group(world.rank, ("data",))

    def sum_replicas(tensor: Tensor) -> Tensor:
        return summing.all_reduce(tensor, members).wait()

    return Connections(main, sum_replicas, mesh, transports)


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


def _make_mesh(world: World, plan: Plan, transport: Transport | None, prepared: CompiledTraining) -> WorkerMesh:
    """Return the axes along which this worker's operators are sharded.

    Their collectives interleave with gradients and with the values between stages, so they have groups of their own.
    """
    waits = CollectiveWaits(clock_of_device(world.device), world.progress)
    if transport is None:
        return WorkerMesh(waits=waits)
    axis_names = prepared.main.layouts.axes(plan.stage_and_replica(world.rank)[0])
    mesh_axes = {axis: TransportAxis(plan.ranks_along(world.rank, axis), transport, waits) for axis in axis_names}
    return WorkerMesh(mesh_axes, {name: axis.index for name, axis in mesh_axes.items()}, waits)
