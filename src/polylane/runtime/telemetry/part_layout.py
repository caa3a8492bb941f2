"""Parts of a batch whose gradients are measured by themselves, and which of them are summed to one gradient.

A part is what one replica computes of one microbatch; a whole microbatch where several replicas compute it together, so
that none has a gradient of its own samples alone. Parts whose gradients are summed make up a pool: the whole batch, or
the samples of one replica where replicas take steps of their own or send their gradients to servers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from polylane.compile.sample_shares import compute_shares
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan
from polylane.program.program import GradientBucket, Program


@dataclass(frozen=True)
class PartLayout:
    """The parts of a batch under a plan, numbered from 0, the same on every worker.

    Attributes:
        microbatches: number of microbatches of the batch.
        replicas: number of replicas of a stage; of stages with different numbers the most.
        divides_microbatches: whether a part is a replica's share of a microbatch, and not a whole one.
        has_pools: whether each replica's parts, which are then shares of microbatches, are a pool, and not all parts.
        is_joint: whether several replicas compute a part together.
    """

    microbatches: int
    replicas: int
    divides_microbatches: bool
    has_pools: bool
    is_joint: bool

    @property
    def parts(self) -> int:
        """Number of parts of a batch."""
        return self.microbatches * (self.replicas if self.divides_microbatches else 1)

    @property
    def pools(self) -> int:
        """Number of pools of a batch."""
        return self.replicas if self.has_pools else 1

    def part_of(self, replica: int, microbatch: int) -> int:
        """Return the part that a replica computes of a microbatch."""
        return replica * self.microbatches + microbatch if self.divides_microbatches else microbatch

    def pool_of(self, part: int) -> int:
        """Return the pool of a part."""
        return part // self.microbatches if self.has_pools else 0

    def pool_samples(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each pool, of a batch of ``samples`` samples."""
        if not self.has_pools:
            return (samples,)
        counts = []
        for replica in range(self.replicas):
            shares = compute_shares(samples, self.microbatches, self.replicas, replica)
            counts.append(sum(share.samples * share.weight for share in shares))
        return tuple(counts)


def lay_out_parts(plan: Plan, microbatches: int, couples_replicas: bool, replica_local: bool) -> PartLayout:
    """Return the parts of a plan's batches.

    Args:
        plan: the plan of the training.
        microbatches: number of microbatches of the batch.
        couples_replicas: whether a gradient depends on samples of other replicas, see :func:`couples_replicas`.
        replica_local: whether replicas do not sum gradients with each other in this step.
    """
    is_joint = couples_replicas or plan.has_uneven_replicas
    pooled = (replica_local or plan.sync.has_servers) and plan.data > 1
    return PartLayout(microbatches, plan.data, not (is_joint or plan.takes_turns), pooled, is_joint)


def couples_replicas(plan: Plan, graph: Graph, batch_is_sharded: bool) -> bool:
    """Return whether the gradient of a replica's samples depends on those of other replicas, in the same microbatch.

    So it is where the loss couples samples, and where a batch normalization has the statistics of all replicas: it
    takes their mean out of the gradients, which are then negatively correlated, and E|G|² is not 𝒢² + S / B.

    Args:
        plan: the plan of the training.
        graph: model and loss, captured for training.
        batch_is_sharded: whether replicas shard operators along the batch.
    """
    shares_statistics = graph.code.has_batch_statistics and not plan.takes_turns and not plan.sync.is_replica_local
    return batch_is_sharded or (plan.data > 1 and shares_statistics)


def summing_ranks(plan: Plan, bucket: GradientBucket, rank: int, is_joint: bool) -> tuple[int, ...]:
    """Return the ranks whose gradients of a part make up the part's gradient, this one among them.

    Args:
        plan: the plan of the training.
        bucket: gradients that are summed together, over all replicas.
        rank: one of the bucket's ranks.
        is_joint: whether several replicas compute a part together.
    """
    if is_joint:
        return bucket.ranks
    replica = plan.stage_and_replica(rank)[1]
    return tuple(member for member in bucket.ranks if plan.stage_and_replica(member)[1] == replica)


@dataclass(frozen=True)
class PartialSum:
    """Gradients of which several ranks have summands of each part: they are summed before they are squared.

    Attributes:
        ranks: the ranks with summands, this one among them.
        names: canonical names of the parameters, the same on all of these.
        is_silent: whether this rank contributes zeros, because another rank has the same summand.
        stage: the stage of this worker behind whose passes they are summed; None: at the end of the step, since not
            all of the ranks make the same passes, or several stages of this worker have a summand.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    is_silent: bool
    stage: int | None


def find_partial_sums(
    plan: Plan, program: Program, is_joint: bool, piecewise: Collection[str]
) -> tuple[PartialSum, ...]:
    """Return what a worker sums of each part before it is squared; all ranks of a sum have it at the same place.

    Args:
        plan: the plan of the training.
        program: this worker's program of the step.
        is_joint: whether several replicas compute a part together.
        piecewise: names of parameters whose gradient the user's own Python may compute in several pieces.
    """
    partition, sums = program.partition, list[PartialSum]()
    used = {stage: set(partition.parameters(stage)) for stage in program.stages}
    for bucket in program.buckets:
        ranks = summing_ranks(plan, bucket, program.rank, is_joint)
        users = [stage for stage in program.stages if not used[stage].isdisjoint(bucket.parameters)]
        is_summed = len(ranks) > 1 or len(users) > 1
        names = bucket.parameters if is_summed else tuple(n for n in bucket.parameters if n in piecewise)
        if names:
            # Replicas in turn make passes of different microbatches, and stages make theirs at different times.
            is_alone = len({plan.stage_and_replica(rank)[0] for rank in ranks}) == 1 and len(users) == 1
            stage = users[0] if is_alone and not (plan.takes_turns and is_joint) else None
            sums.append(PartialSum(ranks, names, program.rank in bucket.zero_contributors, stage))
    return tuple(sums)


def why_not_measured(plan: Plan, couples_replicas: bool) -> str | None:
    """Return in one sentence why the gradient noise cannot be measured under a plan; None where it can be.

    Args:
        plan: the plan of the training.
        couples_replicas: whether a gradient depends on samples of other replicas, see :func:`couples_replicas`.
    """
    layout = lay_out_parts(plan, plan.microbatches, couples_replicas, plan.sync.is_replica_local)
    if plan.is_asynchronous:
        return (
            f"schedule={plan.schedule}: stages update at different times, so that no batch's gradient is of one set of "
            "weights: take a schedule that waits"
        )
    if plan.sync.compress is not None and not layout.has_pools:
        return "sync.compress: what replicas sum are not their gradients, but what is left of them: leave it out"
    if layout.is_joint and layout.has_pools:
        return (
            "the loss, or a batch normalization, couples the samples of replicas, and each sends its own gradient to "
            "the servers, so that nobody has that of a microbatch: leave out servers="
        )
    if layout.parts // layout.pools >= 2:
        return None
    if couples_replicas:
        return (
            "the loss, or a batch normalization, couples the samples of replicas, whose gradients are not independent "
            "then: take 2 or more microbatches, which are compared as wholes"
        )
    return "the batch's gradient is computed as one, so that there are no parts of it to compare: take 2 or more " + (
        "microbatches, since replicas do not sum theirs" if layout.has_pools else "microbatches or replicas"
    )
