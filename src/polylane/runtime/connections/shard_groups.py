"""Shard groups: the ranks over which ZeRO shards parameters, and those that sum the same shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from polylane.plan.plan import Plan
from polylane.program.program import Program


def shard_group(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the ranks over which a rank's parameters are sharded, by the index of their shard.

    They are replicas with the same coordinates in the mesh: all of them, or ``sync.within`` consecutive ones.
    """
    replicas = plan.ranks_along(rank, "data")
    size = plan.sync.within or len(replicas)
    group_start = replicas.index(rank) // size * size
    return replicas[group_start : group_start + size]


def cross_shard_group(plan: Plan, rank: int, ranks: Collection[int]) -> tuple[int, ...] | None:
    """Return those of a bucket's ranks that sum the same shard of it as ``rank``, each in its own shard group.

    They are more than one if replicas are sharded in groups, if ranks along an operator axis have partial sums, or if
    several stages hold the same weights. None if the bucket's ranks do not fall into shard groups of one size.

        bucket's ranks        0    1    2    3        two shard groups: (0, 1) and (2, 3)
        shard they sum        0    1    0    1        reduce-scatter inside a group
        cross_shard_group     (0, 2) (1, 3)           all-reduce of each shard across groups

    Args:
        plan: the parallelization plan of the training.
        rank: rank whose shard is summed, one of ``ranks``.
        ranks: ranks that sum the bucket.
    """
    index, size, cross_ranks = shard_group(plan, rank).index(rank), len(shard_group(plan, rank)), list[int]()
    for peer in ranks:
        group = shard_group(plan, peer)
        if len(group) != size or not set(group) <= set(ranks):
            return None
        if group[index] == peer:
            cross_ranks.append(peer)
    return tuple(sorted(cross_ranks))


def all_shard_groups(plan: Plan, programs: Iterable[Sequence[Program]]) -> set[tuple[int, ...]]:
    """Return all shard groups and cross-shard groups, which the transport must declare."""
    if plan.sync.shard == "none":
        return set()
    groups = {tuple(sorted(shard_group(plan, rank))) for rank in range(plan.workers)}
    bucket_ranks = {
        (program.rank, bucket.ranks)
        for objective_programs in programs
        for program in objective_programs
        for bucket in program.buckets
    }
    crossing = {cross_shard_group(plan, rank, ranks) for rank, ranks in bucket_ranks}
    return groups | {group for group in crossing if group is not None}
