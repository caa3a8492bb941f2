"""Fewer workers: the plan by which a training goes on with the same numbers when workers are lost, or come back.

Replicas are alike, so that one of them can be left out. Where that does not give the number of workers, a search finds
the best plan that computes the same numbers: as many microbatches, and the same synchronization.

    plan                              for three workers
    data=4                            data=3
    data=4,servers=1,dedicated=yes    data=2, and the server
    pipeline=2,tensor=2               the best one with as many microbatches
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polylane.plan.fixed_keys import OPTIONS, FixedKeys
from polylane.plan.options import ROUND_ROBIN, PlanKey
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import KEYS, Spec, parse
from polylane.plan.sync import SyncOptions
from polylane.schedule.schedules import ASYNCHRONOUS


def change_replicas(plan: AnyPlan, workers: int, microbatches: int) -> Spec | None:
    """Return the plan with as many replicas as take another number of workers; None where no number of them does.

    Args:
        plan: in one line, or complete; what it says of cuts and placements is left out.
        workers: number of processes that the plan is to take.
        microbatches: number of microbatches of a step, which stays.
    """
    spec = parse(plan.spec) if isinstance(plan, Plan) else plan
    # Dedicated servers stay as they are: what is left of the workers is for replicas.
    training = workers - (spec.processes - spec.workers)
    replica_size = spec.workers // spec.data
    if spec.stages or training < replica_size or training % replica_size:
        return None
    data = training // replica_size
    # In turn, each replica needs a microbatch of its own.
    if spec.replicas == ROUND_ROBIN and microbatches < data:
        return None
    return replace(spec, data=data, shares=(), microbatches=microbatches, sync=_fit_groups(spec.sync, data))


def _fit_groups(sync: SyncOptions, data: int) -> SyncOptions:
    """Return the options without sharding groups that so many replicas cannot be divided into: numbers are the same."""
    return sync if sync.within is None or data % sync.within == 0 else sync.changed(within=None)


def keep_numbers(plan: AnyPlan, microbatches: int) -> FixedKeys:
    """Return what a plan that is searched in place of another one must keep, so that it computes the same numbers.

    Args:
        plan: the plan that the training began with.
        microbatches: number of microbatches of its steps.
    """
    spec = parse(plan.spec) if isinstance(plan, Plan) else plan
    counts = {"microbatches": microbatches}
    is_asynchronous = spec.schedule in ASYNCHRONOUS
    if is_asynchronous:
        counts["pipeline"] = spec.pipeline  # how old the weights of a stage are
    kept = {key: value for key in OPTIONS if _decides_numbers(KEYS[key], value := getattr(spec, key))}
    return FixedKeys(counts, spec.sync, spec.sync.changed_keys() - {"kind"}, **kept)


def _decides_numbers(row: PlanKey, value: Any) -> bool:
    return value != row.default if row.fixed_values is None else value in row.fixed_values


def keeps(plan: Plan, fixed: FixedKeys) -> bool:
    """Return whether a plan has the keys that a search would have to keep.

    Args:
        plan: a plan that is complete.
        fixed: keys that must stay as they are.
    """
    values = {**plan.option_values(), "chunks": plan.most_chunks}
    if any(getattr(fixed, key) not in (None, values[key]) for key in OPTIONS):
        return False
    if fixed.sync_keys and fixed.sync != plan.sync:
        return False
    return fixed.allows(plan.group_meshes, plan.microbatches)
