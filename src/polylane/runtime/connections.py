"""Which workers talk: the channels and groups of a plan, opened once for all that a job runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from polylane.plan.plan import Plan
from polylane.program.check import channels
from polylane.program.program import Program
from polylane.runtime.mesh import Mesh, TransportAxis, Waits
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
        apart: further transports, whose collectives come in another order.
    """

    transport: Transport
    statistics: SumReplicas | None
    mesh: Mesh
    apart: tuple[Transport, ...] = ()

    def close(self) -> None:
        """Leave together with all other workers: one that ends a group while another still talks may abort it."""
        self.transport.barrier()
        for transport in (*self.apart, self.transport):
            transport.close()


def connected(
    world: World,
    plan: Plan,
    programs: Collection[Sequence[Program]],
    statistics: bool,
    connect: Connect,
    axes: Sequence[str] = (),
) -> Connections:
    """Open all that a job talks by.

    Args:
        world: this worker among all.
        plan: how the training is split.
        programs: of all workers, for every objective.
        statistics: whether any operator shares statistics between replicas.
        connect: makes a transport.
        axes: along which operators are split, in the order of the mesh.
    """
    ranks = range(world.size)
    columns = {plan.column(rank) for rank in ranks}
    replicas = sorted({plan.group(rank, ("data",)) for rank in ranks})
    if world.backend == "nccl":  # one communicator for each pair that talks
        pairs = sorted({pair for each in programs for pair in channels(each)})
    else:
        pairs = sorted({(a, b) for column in columns for a in column for b in column if a != b})
    buckets = [bucket.ranks for each in programs for program in each for bucket in program.buckets]
    whole = [each for rank in ranks for each in (replica_of(plan, rank), plan.group(rank, plan.axes))]
    transport = connect(world, pairs, sorted({*columns, *buckets, *replicas, *whole, tuple(ranks)}))
    mesh, inner = _mesh(world, plan, connect, axes)
    if plan.data == 1 or not statistics or "data" in axes:
        return Connections(transport, None, mesh, inner)
    # Statistics interleave with the gradients' own reductions, so they have groups of their own.
    apart = connect(world, [], replicas, tag=1, own_groups=True)
    members = plan.group(world.rank, ("data",))
    return Connections(transport, lambda tensor: apart.all_reduce(tensor, members).wait(), mesh, (*inner, apart))


def replica_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """All ranks of the same replica: every stage, and every place in its mesh."""
    return tuple(sorted(r for other in plan.column(rank) for r in plan.group(other, plan.axes)))


def _mesh(world: World, plan: Plan, connect: Connect, axes: Sequence[str]) -> tuple[Mesh, tuple[Transport, ...]]:
    """The axes along which this worker's operators are split, and what carries their collectives.

    They interleave with gradients and with the values between stages, so they have channels of their own.
    """
    if not axes:
        return Mesh(), ()
    groups = sorted({plan.group(rank, (axis,)) for rank in range(world.size) for axis in axes})
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    inner, waits = connect(world, pairs, groups, tag=2, own_groups=True), Waits()
    own = {axis: TransportAxis(plan.along(world.rank, axis), inner, waits) for axis in axes}
    return Mesh(own, {name: axis.index for name, axis in own.items()}, waits), (inner,)
