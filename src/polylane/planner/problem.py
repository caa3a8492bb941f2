"""Planning problem: build the cost model and the memory bound of a captured graph on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cost.cost_table import Clock
from polylane.cost.memory.optimizer_state import Factory, OptimizerState, probe_optimizer_state
from polylane.cost.memory.peak import MARGINS
from polylane.cost.memory.saved_tensors import BackendSetting
from polylane.cost.operators import roofline
from polylane.cost.operators.profile import Profile, ProfileClock
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel
from polylane.cost.stage_cost import Lay, StageCosts
from polylane.errors import PolylaneError, format_plural
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, balance_stages
from polylane.plan import fit_to_graph as fit
from polylane.plan.options import SPLIT
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import Degrees, default_microbatches
from polylane.planner.stage_curves import CurveCache
from polylane.sharding.layout import Layout, LayoutOffer, choose_layout
from polylane.sharding.stage_layouts import SHARED_BY, tensors_on_unequal_meshes, values_between_meshes

# Passes over a parameter's bytes in an optimizer's step, besides reading and writing its states once: the parameter is
# read and written, the gradient read, and set to zero for the next step.
PASSES = 4
# Fewest samples that placements are chosen for: a dimension of one sample offers no shards.
LEAST_SAMPLES = 2


@dataclass(frozen=True)
class CapturedProblem:
    """What is to be trained, as far as costs depend on it.

    Attributes:
        graph: of the model and its loss, captured with any number of samples.
        optimizer: (name, parameter) pairs -> the user's optimizer.
        whole: name of a parameter that must not be sharded -> reason for the user.
        pins: requested placements: axis -> name of a parameter or node -> placement.
        profile: measured seconds of the graph's nodes; None: the device model predicts them.
        has_coupled_updates: returns whether the optimizer's update of some parameter depends on others, so that the
            same workers must update all of them.
        check: refuses a plan that the training would refuse; it raises a PolylaneError with a sentence for the user.
    """

    graph: Graph
    optimizer: Factory
    whole: Mapping[str, str] = field(default_factory=dict)
    pins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    profile: Profile | None = None
    has_coupled_updates: Callable[[], bool] = lambda: False
    check: Callable[[Plan, Partition], None] = lambda plan, partition: None


def build_cost_model(
    problem: CapturedProblem, cluster: Cluster, method: TrainingOptions, lay: Lay | None = None
) -> CostModel:
    """Build the cost model of a training on a cluster.

    Args:
        problem: graph, optimizer, pins and profile.
        cluster: the devices and the links between them.
        method: precision, sharding, recomputation and overlap.
        lay: mesh degrees -> placements of the operators; default: chosen for this cluster.
    """
    graph, device = problem.graph, cluster.device(0)
    kind = device.type
    states = probe_optimizer_state(graph, problem.optimizer, kind)
    offers = cache(partial(LayoutOffer, graph))

    def chosen(
        mesh: Degrees, shared: Collection[str] = (), plain: Collection[str] = (), microbatch: int | None = None
    ) -> Layout:
        degrees = {axis: n for axis, n in (("sequence", mesh.sequence), ("tensor", mesh.tensor)) if n > 1}
        whole_tensors = {**dict.fromkeys(shared, SHARED_BY), **problem.whole}
        # As its training chooses (`polylane.sharding.stage_layouts`): by nominal speeds, which all workers know alike,
        # and for the samples of its plan, where that is known.
        samples = graph.samples if microbatch is None else max(LEAST_SAMPLES, -(-microbatch // mesh.data))
        return choose_layout(
            graph, degrees, samples, pins=problem.pins, whole=whole_tensors, plain=plain, offer=offers(samples)
        )

    setting = BackendSetting(graph.samples, device=kind, **_precision_setting(method))
    return CostModel(
        cluster=_with_measured_contention(cluster, problem.profile),
        stages=StageCosts(graph, lay or chosen, _passes_itemsize(method), setting),
        method=method,
        make_clock=_make_clocks(problem.profile, method),
        update_seconds=_make_update_clock(problem, states),
        optimizer=states,
        margin=MARGINS[kind],
        host_overhead=0.0 if problem.profile is not None else device.turn / device.speed,
    )


def fit_to_meshes(basis: CostModel, partition: Partition, plan: Plan, batch: int | None = None) -> CostModel:
    """Return the cost model with the placements that a plan's meshes allow, as its training has them.

    Where meshes differ, tensors that several stages hold are whole on all of them, and values that cross are no sums.

    Args:
        basis: the cost model, with its placements chosen for meshes alone.
        partition: the graph, divided into the plan's stages.
        plan: the meshes of the stages, and the number of microbatches.
        batch: samples of a step, for whose local samples placements are chosen; None: for those of the capture.
    """
    constraints: dict[str, Any] = {}
    if not plan.is_uniform:
        constraints["shared"] = tensors_on_unequal_meshes([partition], plan)
        constraints["plain"] = values_between_meshes(partition, plan)
    if batch is not None and plan.axes:
        constraints["microbatch"] = -(-batch // plan.microbatches)
    return replace(basis, stages=basis.stages.with_placements(**constraints)) if constraints else basis


def _with_measured_contention(cluster: Cluster, profile: Profile | None) -> Cluster:
    """Return the cluster with host contention as measured with this model, if it was, in place of the probe's."""
    if profile is None or not profile.host_contention:
        return cluster
    contention = dict(profile.host_contention)
    return replace(cluster, hosts=tuple(h.model_copy(update={"contention": contention}) for h in cluster.hosts))


def _precision_setting(method: TrainingOptions) -> dict[str, Any]:
    """Return the backend setting of a precision: autocast keeps float32 parameters; pure 16-bit modes convert all."""
    if not method.is_half_precision:
        return {}
    low = getattr(torch, method.dtype)
    return {"autocast": low} if method.masters else {"dtype": low}


def _passes_itemsize(method: TrainingOptions) -> int | None:
    """Return the most bytes of a floating-point element in 16-bit passes; None: values keep their own."""
    return method.float_itemsize if method.is_half_precision else None


def _make_clocks(profile: Profile | None, method: TrainingOptions) -> Callable[[Device], Clock]:
    def of(device: Device) -> Clock:
        model = roofline.Roofline(device, method.dtype, _passes_itemsize(method))
        return model if profile is None else ProfileClock(profile, model, device.speed)

    return of


def _make_update_clock(problem: CapturedProblem, states: OptimizerState) -> Callable[[Device, int], float]:
    """Return a function of the seconds of an optimizer step: measured, or from the bytes it reads and writes."""
    trained = [(n, info) for n, info in problem.graph.parameters.items() if info.trainable]
    elements = sum(math.prod(info.shape) for _, info in trained)
    state_bytes = sum(states.bytes(name, info.shape) for name, info in trained)
    parameter_bytes = sum(info.bytes for _, info in trained)
    # Bytes of memory traffic per element: each state is read and written.
    bytes_per_element = (PASSES * parameter_bytes + 2 * state_bytes) / max(elements, 1)
    measured = None if problem.profile is None or not elements else problem.profile.update_seconds / elements

    def seconds(device: Device, count: int) -> float:
        if measured is not None:
            return measured * count / device.speed
        return count * bytes_per_element / (device.bandwidth * device.speed) + device.overhead

    return seconds


def fit_plan(basis: CostModel, plan: AnyPlan, batch: int) -> tuple[Partition, Plan]:
    """Complete a plan: cut its stages to balance the predicted times, unless it is a full plan already.

    Raises:
        PolylaneError: the plan is for another model, or has more stages, replicas or microbatches than possible.
    """
    graph = basis.stages.graph
    if isinstance(plan, Plan):
        partition = fit.partition_for(plan, graph)
        fit.check_asynchronous(plan, partition)
        fit.check_recompute(plan, [partition])
        return partition, fit.with_fingerprint(plan, graph)
    microbatches = default_microbatches(plan, batch)
    for name, parts in (("microbatches", microbatches), ("data", plan.data)):
        if parts > batch:
            raise PolylaneError(
                f"{name}={parts}: a batch of {format_plural(batch, 'sample')} cannot be divided into so many"
            )
    partition = Partition(graph, ())
    if plan.pipeline > 1:
        fit.check_chunks(plan, graph)
        # Balanced by the times on the widest mesh, with the local samples that it leaves; weights are the
        # stages' workers.
        widest = max(plan.meshes, key=lambda mesh: mesh.workers)
        samples = -(-batch // (microbatches * (widest.data if plan.replicas == SPLIT else 1)))
        table = CurveCache(basis, batch).table(widest, samples)
        times = np.diff(table.forward + table.backward + table.waits + table.backward_waits)
        partition = balance_stages(graph, len(plan.meshes), list(times), [mesh.workers for mesh in plan.meshes])
    fitted = fit.plan_from_partition(partition, plan, microbatches)
    fit.check_asynchronous(fitted, partition)
    fit.check_recompute(fitted, [partition])
    return partition, fitted
