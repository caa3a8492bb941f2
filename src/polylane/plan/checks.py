"""Checks of a plan by itself, whatever the model: meshes, devices, chunks and synchronization fit each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from polylane.errors import PolylaneError
from polylane.plan.pinned_placements import check_axes
from polylane.plan.spec import check_workers, format_degrees
from polylane.schedule.schedules import DEFAULT_CHUNKS, assign_stages, splits_backward

if TYPE_CHECKING:
    from polylane.plan.plan import Plan

# The axes of a stage's mesh, the outermost first: its devices are listed in this order.
MESH = ("data", "sequence", "tensor")


def check(plan: Plan) -> None:
    """Refuse a plan that contradicts itself, whatever the model.

    Raises:
        PolylaneError: a stage's devices do not fill its mesh, a device is named twice or left out, a placement is for
            an axis that the stage does not have, or sync does not fit the meshes.
    """
    _check_meshes(plan)
    _check_devices(plan)
    _check_chunks(plan)
    _check_sync(plan)


def _check_meshes(plan: Plan) -> None:
    if not plan.stages:
        raise PolylaneError(f"{plan.title}: stages: there must be at least one")
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) != math.prod(stage.mesh.values()):
            mesh = ", ".join(f"{axis}={stage.degree(axis)}" for axis in MESH if axis in stage.mesh) or "data=1"
            raise PolylaneError(f"{plan.title}: stages.{index}: {len(stage.devices)} devices for a mesh of {mesh}")
    check_workers(plan.workers, format_degrees(plan.group_meshes))
    check_axes([stage.placements for stage in plan.stages], [plan.axes_of(s) for s in range(plan.pipeline)], plan.title)


def _check_devices(plan: Plan) -> None:
    """Refuse ranks that are named twice, or that are not all of 0 to the number of workers."""
    seen: dict[int, int] = {}
    for index, stage in enumerate(plan.stages):
        first = plan.first_chunk(index)
        alike = first != index and stage.devices == plan.stages[first].devices and plan.have_same_mesh(first, index)
        if alike and plan.schedule in DEFAULT_CHUNKS:
            continue  # a further chunk of the same workers
        for device in stage.devices:
            if device in seen:
                where = (
                    f"stages.{index}.devices names {device} twice"
                    if seen[device] == index
                    else f"device {device} is on stages {seen[device]} and {index}"
                )
                chunks = "; stages that share workers have the same devices, in the same order, and the same mesh"
                several = chunks if plan.schedule in DEFAULT_CHUNKS else ""
                raise PolylaneError(f"{plan.title}: {where}: every worker has one place{several}")
            seen[device] = index
    # All different, so they are 0 to most if and only if none of these is missing.
    most = len(seen) - 1
    missing = next((device for device in range(len(seen)) if device not in seen), None)
    if missing is not None:
        other = next(device for device in seen if not 0 <= device <= most)
        raise PolylaneError(
            f"{plan.title}: devices must be numbered from 0 to {most}: {other} is there, but {missing} is not"
        )


def _check_chunks(plan: Plan) -> None:
    """Refuse stages on other workers than the schedule gives them to."""
    groups, given = len(plan.first_chunks), plan.stage_groups
    chunks, left = divmod(plan.pipeline, groups)
    try:
        wanted = None if left else assign_stages(plan.schedule, groups, chunks)
    except ValueError as error:
        raise PolylaneError(f"{plan.title}: stages: {error}") from None
    if given != wanted:
        stage = 0 if wanted is None else next(s for s in range(plan.pipeline) if given[s] != wanted[s])
        why = (
            f"{plan.pipeline} stages on {groups} groups of workers, some with more than others"
            if wanted is None
            else f"stage {stage} is on the workers of stage {plan.first_chunk(stage)}, and the schedule "
            f"{plan.schedule} has it on those of stage {plan.first_chunks[wanted[stage]]}"
        )
        raise PolylaneError(f"{plan.title}: stages: {why}")


def _check_sync(plan: Plan) -> None:
    """Refuse sync options that the meshes do not allow."""
    sync = plan.sync
    # A replica that takes steps of its own, or that servers count, must be one replica of every stage.
    if plan.resplits_batch and (sync.is_replica_local or sync.has_servers):
        key = "kind: parameter_server" if sync.has_servers else f"every: {sync.every}"
        raise PolylaneError(f"{plan.title}: sync.{key} needs as many replicas of every stage: give all the same data")
    for stage in range(plan.pipeline):
        if sync.within is not None and plan.degree("data", stage) % sync.within:
            raise PolylaneError(
                f"{plan.title}: sync.within: {plan.degree('data', stage)} replicas of stage {stage} cannot be divided "
                f"into groups of {sync.within}"
            )
    if splits_backward(plan.schedule) and sync.shard == "parameters":
        raise PolylaneError(
            f"{plan.title}: schedule: {plan.schedule} and shard: parameters exclude each other, since weights are "
            "released between the two halves of a backward pass: take shard: gradients, or another schedule"
        )
    for rank in plan.slow:
        if not 0 <= rank < plan.workers:
            raise PolylaneError(f"{plan.title}: slow.{rank}: there is no such rank among {plan.workers} workers")
