"""Which workers talk: the channels and groups of a plan, opened once for all that a job runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.graph.whole_batch import statistics_of
from polylane.plan.plan import Plan
from polylane.program.check import channels
from polylane.program.program import Program
from polylane.runtime.mesh import Mesh, TransportAxis, Waits
from polylane.runtime.prepare import Prepared
from polylane.runtime.sync.sharded_layout import shard_group, shard_groups
from polylane.runtime.traffic import AGREEMENT, OPERATORS, STATISTICS
from polylane.runtime.transport.choose import transport_for
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.world import World

Connect = Callable[..., Transport]
SumReplicas = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Connections:
    """What a worker reaches the others by.

    Attributes:
        transport: values between stages, gradients, objects.
        statistics: sums batch statistics over the replicas of this worker's stage; None where each has its own.
        mesh: the axes along which operators are split.
        apart: further transports, whose collectives come in another order, by what they are for.
    """

    transport: Transport
    statistics: SumReplicas | None
    mesh: Mesh
    apart: Mapping[str, Transport] = field(default_factory=dict)

    @property
    def gathers(self) -> Transport | None:
        """For parameters that replicas hold parts of only; None where there are none."""
        return self.apart.get(AGREEMENT)

    def close(self) -> None:
        """Leave together with all other workers: one that ends a group while another still talks may abort it."""
        self.transport.barrier()
        for transport in (*self.apart.values(), self.transport):
            transport.close()


def check_size(plan: Plan, world: World) -> None:
    """See that there are as many workers as a plan takes.

    Raises:
        PolylaneError: there are not.
    """
    if world.size != plan.processes:
        raise PolylaneError(f"the plan takes {plan.processes} workers ({plan.spec}), there are {world.size}")


def connected(
    prepared: Prepared, world: World, programs: Collection[Sequence[Program]], connect: Connect | None = None
) -> Connections:
    """Open all that a job talks by.

    Args:
        prepared: the training.
        world: this worker among all.
        programs: of all workers, for every objective.
        connect: makes a transport; default: what suits where the workers are.
    """
    plan, connect = prepared.plan, transport_for(world) if connect is None else connect
    statistics = any(_shares_statistics(partition) for partition in prepared.partitions.values())
    ranks = range(world.size)
    peers = {(rank, peer) for rank in ranks for s in range(plan.pipeline) for peer in plan.peers(rank, s)}
    replicas = sorted({plan.group(rank, ("data",)) for rank in ranks})
    if world.backend == "nccl":  # one communicator for each pair that talks
        pairs = sorted({pair for each in programs for pair in channels(each)})
    else:
        pairs = sorted((a, b) for a, b in peers if a != b)
    buckets = [bucket.ranks for each in programs for program in each for bucket in program.buckets]
    whole = [each for rank in ranks for each in (replica_of(plan, rank), plan.group(rank, plan.axes))]
    columns = {column_of(plan, rank) for rank in ranks}
    shards = shard_groups(plan, programs)
    transport = connect(world, pairs, sorted({*columns, *buckets, *replicas, *whole, *shards, tuple(ranks)}))
    mesh, inner = _mesh(world, plan, connect, [prepared.axes(stage) for stage in range(plan.pipeline)])
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


def _shares_statistics(partition: Partition) -> bool:
    """Whether replicas tell each other of their samples: for batch normalization, or for counts of the whole batch."""
    code = partition.graph.code
    return code.batch_statistics or bool(statistics_of(code.fx))


def replica_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """All ranks of the same replica: every stage, and every place in its mesh.

    All there are where stages have different numbers of replicas.
    """
    if plan.redivides:
        return tuple(range(plan.workers))
    replica = plan.place(rank)[1]
    return tuple(other for other in range(plan.workers) if plan.place(other)[1] == replica)


def column_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks with the same place in the meshes of all stages, by stage; :func:`replica_of` where meshes differ."""
    if not plan.uniform:
        return replica_of(plan, rank)
    return tuple(plan.peers(rank, stage)[0] for stage in range(plan.pipeline))


def _mesh(world: World, plan: Plan, connect: Connect, axes: Sequence[Sequence[str]]) -> tuple[Mesh, Transport | None]:
    """The axes along which this worker's operators are split, and what carries their collectives.

    They interleave with gradients and with the values between stages, so they have channels of their own.
    """
    if not any(axes):
        return Mesh(), None
    stages = [plan.place(rank)[0] for rank in range(world.size)]
    groups = sorted({plan.group(rank, (axis,)) for rank, stage in enumerate(stages) for axis in axes[stage]})
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    inner, waits = connect(world, pairs, groups, tag=2, own_groups=True), Waits()
    mine = axes[stages[world.rank]]
    own = {axis: TransportAxis(plan.along(world.rank, axis), inner, waits) for axis in mine}
    return Mesh(own, {name: axis.index for name, axis in own.items()}, waits), inner
