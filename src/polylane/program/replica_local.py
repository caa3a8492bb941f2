"""Replica-local programs: steps without gradient sums between replicas, for local SGD and parameter servers."""

from __future__ import annotations

from dataclasses import replace

from polylane.plan.plan import Plan
from polylane.program.program import Program
from polylane.schedule.action import ActionKind


def without_replica_sync(program: Program, plan: Plan) -> Program:
    """Return the program without the gradient sums between replicas.

    Ranks of one replica still sum: those along operator axes, and those of stages that hold the same (tied) weights.
    """
    groups = {bucket.ranks for bucket in program.buckets}  # few groups, each shared by many buckets
    within = {ranks: tuple(r for r in ranks if plan.stage_and_replica(r)[1] == program.replica) for ranks in groups}
    own = tuple(replace(bucket, ranks=within[bucket.ranks]) for bucket in program.buckets)
    summed = {bucket.name for bucket in own if len(bucket.ranks) > 1}
    actions = tuple(a for a in program.actions if a.kind is not ActionKind.REDUCE or a.value in summed)
    return replace(program, actions=actions, buckets=own)
