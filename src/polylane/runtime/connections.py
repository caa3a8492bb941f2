"""Which workers talk: the channels and groups of a plan, opened once for all that a job runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from polylane.plan.plan import Plan
from polylane.program.check import channels
from polylane.program.program import Program
from polylane.runtime.mesh import Mesh, TransportAxis, Waits
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.world import World

Connect = Callable[..., Transport]
SumReplicas = Callable[[Tensor], Tensor]


def connected(
    world: World,
    plan: Plan,
    programs: Collection[Sequence[Program]],
    statistics: bool,
    connect: Connect,
    axes: Sequence[str] = (),
) -> tuple[Transport, SumReplicas | None, Mesh]:
    """The transport of a job, what sums batch statistics over the replicas of this worker's stage, and its mesh.

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
    mesh = _mesh(world, plan, connect, axes)
    if plan.data == 1 or not statistics or "data" in axes:
        return transport, None, mesh
    # Statistics interleave with the gradients' own reductions, so they have groups of their own.
    apart = connect(world, [], replicas, tag=1, own_groups=True)
    members = plan.group(world.rank, ("data",))
    return transport, lambda tensor: apart.all_reduce(tensor, members).wait(), mesh


def replica_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """All ranks of the same replica: every stage, and every place in its mesh."""
    return tuple(sorted(r for other in plan.column(rank) for r in plan.group(other, plan.axes)))


def _mesh(world: World, plan: Plan, connect: Connect, axes: Sequence[str]) -> Mesh:
    """The axes along which this worker's operators are split.

    Their collectives interleave with gradients and with the values between stages, so they have channels of their own.
    """
    if not axes:
        return Mesh()
    groups = sorted({plan.group(rank, (axis,)) for rank in range(world.size) for axis in axes})
    pairs = [(a, b) for group in groups for a in group for b in group if a != b]
    inner, waits = connect(world, pairs, groups, tag=2, own_groups=True), Waits()
    own = {axis: TransportAxis(plan.along(world.rank, axis), inner, waits) for axis in axes}
    return Mesh(own, {name: axis.index for name, axis in own.items()}, waits)
