"""Which workers talk: the channels and groups of a plan, opened once for all that a job runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from polylane.plan.plan import Plan
from polylane.program.check import channels
from polylane.program.program import Program
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.world import World

Connect = Callable[..., Transport]
SumReplicas = Callable[[Tensor], Tensor]


def connected(
    world: World, plan: Plan, programs: Collection[Sequence[Program]], statistics: bool, connect: Connect
) -> tuple[Transport, SumReplicas | None]:
    """The transport of a job, and what sums batch statistics over the replicas of this worker's stage.

    Args:
        world: this worker among all.
        plan: how the training is split.
        programs: of all workers, for every objective.
        statistics: whether any operator shares statistics between replicas.
        connect: makes a transport.
    """
    columns = [tuple(stage.devices[replica] for stage in plan.stages) for replica in range(plan.data)]
    replicas = [stage.devices for stage in plan.stages]
    if world.backend == "nccl":  # one communicator for each pair that talks
        pairs = sorted({pair for each in programs for pair in channels(each)})
    else:
        pairs = [(a, b) for column in columns for a in column for b in column if a != b]
    buckets = [bucket.ranks for each in programs for program in each for bucket in program.buckets]
    transport = connect(world, pairs, sorted({*columns, *buckets, *replicas, tuple(range(world.size))}))
    if plan.data == 1 or not statistics:
        return transport, None
    # Statistics interleave with the gradients' own reductions, so they have groups of their own.
    apart = connect(world, [], replicas, tag=1, own_groups=True)
    members = plan.stages[plan.place(world.rank)[0]].devices
    return transport, lambda tensor: apart.all_reduce(tensor, members).wait()
