"""Order of passes of a plan with ``schedule: auto``: found for its times, messages and memory, judged by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from polylane.cost.network.collectives import message_seconds
from polylane.cost.plan_cost import CostModel, PlanCost
from polylane.cost.predict import predict
from polylane.cost.weight_halves import HALVING_SHARE, HALVING_SHARE_ELSEWHERE, WeightHalves
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.placement.operator_view import view_operators
from polylane.plan.lanes import stage_graph_of
from polylane.plan.order import format_order
from polylane.plan.plan import Plan
from polylane.schedule.problem import NoScheduleFits, ScheduleProblem
from polylane.schedule.schedules import NAMES, schedule_lanes
from polylane.schedule.search import EFFORT, find_schedule
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes
from polylane.schedule.zero_bubble import v_stages

# What the search knows of memory is rounded: a bound that the simulation finds broken is lowered by this factor.
LOWER, TRIES = 0.85, 4


def find_order(
    basis: CostModel,
    partition: Partition,
    plan: Plan,
    batch: int,
    memory: float | None = None,
    effort: int = EFFORT,
    placed: bool = False,
) -> Plan:
    """Return the plan with its order of passes, if its schedule is ``auto`` and has none yet.

    Orders that are searched for, in which every backward pass may be whole or in halves, and those of the named
    schedules that stages on these workers can have, are simulated; the fastest one that fits into the memory is taken.
    Two stages of each worker are tried dealt round-robin, and as a V.

    Args:
        basis: prices of the training on its cluster.
        partition: the graph, cut into the plan's stages.
        plan: the plan to be completed.
        batch: samples of a step, over all replicas.
        memory: bytes that a worker may hold; None: what its device has.
        effort: number of tasks that each search plays.
        placed: whether the stages stay on the workers on which the plan has them, since its user wrote so.

    Raises:
        PolylaneError: no order fits into the memory; it says what the one that needs least would take.
    """
    if plan.schedule != "auto" or plan.order:
        return plan
    best: tuple[float, Plan] | None = None
    excess: tuple[float, int] | None = None
    candidates = (
        placed_plan.model_copy(update={"order": format_order(lanes)})
        for placed_plan in ([plan] if placed else _placements(plan))
        for lanes in _candidates(basis, partition, placed_plan, batch, memory, effort)
    )
    for trial in candidates:
        if trial.splits_backward and plan.sync.shard == "parameters":
            continue  # weights are released between the halves
        prediction = predict(basis, partition, trial, batch)
        over = max(
            (stage.memory.total - limit, group)
            for group, (stage, limit) in enumerate(zip(prediction.stages, _limits(basis, trial, memory), strict=True))
        )
        if over[0] <= 0 and (best is None or prediction.seconds < best[0]):
            best = prediction.seconds, trial
        excess = over if excess is None or over < excess else excess
    if best is None:
        assert excess is not None, "named schedules are among the candidates"
        raise PolylaneError(
            f"{plan.title}: schedule: auto: no order of passes fits into the memory of the workers of stage "
            f"{plan.first_chunks[excess[1]]}: the least would take {excess[0] / 2**30:.2f} GiB more than there are"
        )
    return best[1]


def find_measured_order(
    partition: Partition,
    plan: Plan,
    seconds: Sequence[tuple[float, float]],
    device: str = "cpu",
    placed: bool = False,
    effort: int = EFFORT,
) -> Plan:
    """Return the plan with its order of passes, found for measured times alone: where no cluster is described.

    Messages are taken to be free, and no worker holds more microbatches than the first one does under 1F1B: as many as
    there are groups of workers. Two halves of a backward pass take longer than the whole by a fixed part of it.

    Args:
        partition: the graph, cut into the plan's stages.
        plan: the plan to be completed; as it is if its schedule is another one, or its order is there.
        seconds: (forward, backward) of every node of the graph.
        device: the kind of device on which they were measured.
        placed: whether the stages stay on their workers, as for :func:`find_order`.
        effort: number of tasks that each search plays.
    """
    if plan.schedule != "auto" or plan.order:
        return plan
    nodes = partition.graph
    shares = WeightHalves(nodes, view_operators(nodes, nodes.samples, 1), {}).shares
    halving = HALVING_SHARE if device == "cpu" else HALVING_SHARE_ELSEWHERE
    forward, input_, weight, longer = (np.zeros(plan.pipeline) for _ in range(4))
    for position, ((forward_seconds, back), share) in enumerate(zip(seconds, shares, strict=True)):
        stage = partition.stage_of[nodes.nodes[position].name]
        forward[stage] += forward_seconds
        input_[stage] += back * (1 - share)
        weight[stage] += back * share
        longer[stage] += back * halving * (share > 0)
    best: tuple[tuple[float, float], Plan] | None = None
    for placed_plan in [plan] if placed else _placements(plan):
        chunks, groups = len(placed_plan.first_chunks), placed_plan.stage_groups
        schedule = find_schedule(
            ScheduleProblem(
                graph=stage_graph_of(partition, placed_plan),
                workers=groups,
                microbatches=plan.microbatches,
                forward=tuple(forward),
                input_gradient=tuple(input_),
                weight_gradient=tuple(weight + longer),
                backward=tuple(input_ + weight),
                # What 1F1B's first worker holds: as many microbatches as there are groups, of each of its stages.
                memory=tuple(float(groups.count(group) * chunks) for group in range(chunks)),
                split=plan.sync.shard != "parameters",
            ),
            effort=effort,
        )
        rank = schedule.makespan, sum(schedule.peak_bytes)
        if best is None or rank < best[0]:
            best = rank, placed_plan.model_copy(update={"order": format_order(schedule.lanes)})
    assert best is not None
    return best[1]


def _placements(plan: Plan) -> list[Plan]:
    """Return the plan, and if each worker has two stages also the plan with them as a V: the first and the last, ...

    A gradient then comes back on the way on which its value went, and the worker with the first stage also has the
    last: the two that differ most from the others.
    """
    chunks, meshes = len(plan.first_chunks), set(plan.meshes)
    if chunks == 1 or plan.pipeline != 2 * chunks or len(meshes) > 1:
        return [plan]
    stages = tuple(
        stage.model_copy(update={"devices": plan.stages[plan.first_chunks[group]].devices})
        for stage, group in zip(plan.stages, v_stages(chunks), strict=True)
    )
    return [plan, Plan(**{**dict(plan), "stages": stages})]


def _limits(basis: CostModel, plan: Plan, memory: float | None) -> list[float]:
    """Return the bytes that a worker of each group may hold."""
    groups = (plan.stages[stage].devices for stage in plan.first_chunks)
    limits = [min(device.memory for device in basis.cluster.devices(ranks)) for ranks in groups]
    return [limit if memory is None else min(limit, memory) for limit in limits]


def _candidates(
    basis: CostModel, partition: Partition, plan: Plan, batch: int, memory: float | None, effort: int
) -> Iterator[Lanes]:
    """Yield orders of passes, those of named schedules first."""
    graph = stage_graph_of(partition, plan)
    named = [lanes for name in NAMES if (lanes := _lanes_or_none(name, graph, plan)) is not None]
    yield from named
    # Memory beside activations is that of any order.
    first_lanes = named[0] if named else find_schedule(_plain_problem(graph, plan)).lanes
    scene = PlanCost(basis, partition, plan.model_copy(update={"order": format_order(first_lanes)}), batch)
    bounds = [
        limit - (total := scene.predict_stage(stage).memory).total + total.activations
        for stage, limit in zip(plan.first_chunks, _limits(basis, plan, memory), strict=True)
    ]
    for _ in range(TRIES):
        try:
            best = find_schedule(build_problem(scene, graph, bounds), effort=effort)
        except NoScheduleFits:  # nor would any under the lower bounds of a later try
            break
        yield best.lanes
        bounds = [bound * LOWER for bound in bounds]
        if all(peak <= bound for peak, bound in zip(best.peak_bytes, bounds, strict=True)):
            break  # a lower bound would lead to nothing else


def _lanes_or_none(name: str, graph: StageGraph, plan: Plan) -> Lanes | None:
    """Return the lanes of a named schedule; None where it has other stages on its workers."""
    try:
        return schedule_lanes(name, graph, plan.microbatches, plan.stage_groups)
    except ValueError:  # an interleaved schedule, say, for workers with one stage each
        return None


def _plain_problem(graph: StageGraph, plan: Plan) -> ScheduleProblem:
    """Return the scheduling problem of equal stages without messages."""
    unit_seconds = (1.0,) * plan.pipeline
    return ScheduleProblem(
        graph=graph,
        workers=plan.stage_groups,
        microbatches=plan.microbatches,
        forward=unit_seconds,
        input_gradient=unit_seconds,
        weight_gradient=unit_seconds,
    )


def build_problem(scene: PlanCost, graph: StageGraph, bounds: Sequence[float]) -> ScheduleProblem:
    """Return the scheduling problem of a plan's stages, each backward pass whole or in halves.

    Args:
        scene: prices of the plan's stages.
        graph: which stages feed which.
        bounds: bytes of activations that each group of workers may hold; empty: no bound.
    """
    plan, overhead, stages = scene.plan, scene.basis.host_overhead, range(scene.plan.pipeline)
    costs = [scene.pass_costs(stage) for stage in stages]
    forward = tuple(cost.forward + cost.waits + shard.waits + overhead for cost, shard in costs)
    backward = tuple(cost.backward + cost.backward_waits + shard.backward_waits + overhead for cost, shard in costs)
    # Each half is launched by itself.
    input_ = tuple(cost.backward_input + cost.backward_waits + overhead for cost, _ in costs)
    weight = tuple(cost.second_half + shard.backward_waits + overhead for cost, shard in costs)
    hop = dict[tuple[int, int], float]()
    for crossing in scene.partition.crossings:
        start = crossing.producer
        size = scene.sharded_graph(start).busiest_value_bytes(crossing.value, scene.local_samples(start))
        for end in crossing.consumers:
            ends = plan.stages[start].devices[0], plan.stages[end].devices[0]
            seconds = message_seconds(scene.basis.cluster, size, *ends, len(plan.stages[end].devices))
            hop[start, end] = hop.get((start, end), 0.0) + seconds
    return ScheduleProblem(
        graph=graph,
        workers=plan.stage_groups,
        microbatches=plan.microbatches,
        forward=forward,
        input_gradient=input_,
        weight_gradient=weight,
        hop=hop,
        activation_bytes=tuple(float(scene.microbatch_memory(stage).live_bytes) for stage in stages),
        memory=tuple(bounds),
        split=plan.sync.shard != "parameters",  # their weights are released between the halves
        backward=backward,
    )
