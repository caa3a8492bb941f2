"""Report of a plan: its stages with their costs, the values that cross between them, and how operators are split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch

from polylane.compile.compiled_graph import compile_graph
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.reshard import Resharder, value_specs
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.network.alpha_beta import RankSpeed
from polylane.cost.operators.profile import Both, Profile
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.cost.simulator.schedule_tasks import simulate_replicas, simulate_schedule
from polylane.cost.stage_cost import PassCosts
from polylane.graph.batch import split_bounds
from polylane.graph.operators.autocast_reads import dtypes_under_autocast, find_cast_weights
from polylane.graph.partition import Partition
from polylane.graph.precision import autocast_dtype
from polylane.inspection.graph_report import count_elements
from polylane.observe.timeline import Timeline
from polylane.placement.enumerate_strategies import enumerate_strategies
from polylane.placement.operator_view import view_operators
from polylane.placement.rewrite import AxisSplit
from polylane.plan.lanes import lanes_of, replica_lanes_of, stage_graph_of
from polylane.plan.plan import Plan
from polylane.planner import problem as setup
from polylane.planner.ranked_plan import RankedPlan
from polylane.probe.machine import running_cluster
from polylane.program.boxes import box_volume
from polylane.program.lower import crossing_as_sent
from polylane.runtime.connections.connections import count_communicators, declare_transports
from polylane.runtime.pipeline.bind_program import lower_ahead
from polylane.runtime.workers.world import accelerator_type
from polylane.samples.derivation import derive_composition
from polylane.samples.microbatch_limit import min_samples_for
from polylane.schedule.live import peak_live
from polylane.sharding.cost_model import CostSetting
from polylane.sharding.explain import explain, format_explanation
from polylane.sharding.layout import Layout
from polylane.sharding.stage_layouts import StageLayouts, choose_layouts

MOST_WORKERS = 64  # whose programs are made to count their communicators


def report_plan(
    prepared: CompiledTraining, costs: Sequence[PlanCost], seconds: Sequence[Both], batch: int
) -> dict[str, Any]:
    """Return the plan's stages, crossings and splits as plain data.

    Args:
        prepared: the training, compiled for the plan.
        costs: the cost of every stage, from :func:`price_stages`.
        seconds: (forward, backward) of every node, for as many samples as the graph was captured with.
        batch: number of samples of a step, over all workers.
    """
    return {
        "plan": prepared.plan.spec,
        "workers": prepared.plan.workers,
        "share": _share(prepared, batch),
        "stages": _stages(prepared, costs, seconds),
        "edges": count_stage_traffic(prepared, -(-batch // prepared.plan.microbatches), dtypes_of(prepared)),
        "utilization": utilization_at_best(prepared, costs),
        "gathers": _gathers(prepared),
        "crossings": _crossings(prepared.main_partition),
        "splits": _splits(prepared),
        "communicators": count_plan_communicators(prepared) if prepared.plan.workers <= MOST_WORKERS else None,
    }


def count_plan_communicators(prepared: CompiledTraining) -> tuple[int, ...]:
    """Return how many communicators each worker has where each has a GPU, and NCCL carries everything."""
    programs = lower_ahead(prepared).values()
    return count_communicators(declare_transports(prepared, programs, is_ordered=True).values(), prepared.plan.workers)


def count_found_communicators(
    problem: TrainingProblem, captured: setup.CapturedProblem, ranked_plan: RankedPlan
) -> tuple[int, ...] | None:
    """Return how many communicators each worker of a found plan would have over NCCL; nothing is captured again.

    Args:
        problem: the training with all its objectives.
        captured: what the plan was found for, with the parameters that must not be sharded.
        ranked_plan: the plan, with the graph cut into its stages.

    Returns:
        The numbers by rank; None for several objectives, of which the search has seen the first, and for more than
        :data:`MOST_WORKERS` workers.
    """
    plan, partition = ranked_plan.plan, ranked_plan.partition
    if len(problem.objectives) > 1 or plan.workers > MOST_WORKERS:
        return None
    layouts = StageLayouts((None,) * plan.pipeline)
    if plan.axes:
        layouts = choose_layouts(partition, plan, -(-problem.samples // plan.microbatches), captured.whole)
    batch_layouts = derive_composition(partition.graph, plan.per_sample).batch_layouts if plan.resplits_batch else {}
    prepared = CompiledTraining(
        model=problem.model,
        objectives=problem.objectives,
        graphs={name: compile_graph(partition, plan, layouts, batch_layouts) for name in problem.objectives},
        evaluations={},
        plan=plan,
        in_float64=problem.in_float64,
        init=problem.init,
        min_samples=min_samples_for(plan, [partition.graph]),
        samples=problem.samples,
        held=problem.held,
    )
    return count_plan_communicators(prepared)


def price_stages(prepared: CompiledTraining, seconds: Sequence[Both], batch: int) -> tuple[PlanCost, ...]:
    """Return the costs of every stage by the cost model of ``polylane simulate``, with the layouts that are trained.

    Args:
        prepared: the training, compiled for the plan.
        seconds: (forward, backward) of every node, measured on this machine for as many samples as the graph has.
        batch: number of samples of a step, over all workers.
    """
    plan, partition = prepared.plan, prepared.main_partition
    graph, layouts = partition.graph, prepared.main.layouts
    total = (sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds))
    nodes = {node.name: (node_seconds,) for node, node_seconds in zip(graph.nodes, seconds, strict=True)}
    optimizer = next(iter(prepared.objectives.values())).optimizer
    problem = setup.CapturedProblem(graph, optimizer, {}, {}, Profile((graph.samples,), nodes, (total,)))
    # The seconds were measured where the model's weights are: so costs are those of such devices.
    device = next((parameter.device.type for parameter in prepared.model.parameters()), "cpu")
    cluster = running_cluster(plan.workers, "cuda" if device == "cuda" else "cpu")

    @cache
    def scene(layout: Layout | None) -> PlanCost:
        """Return the costs of all stages, each with this layout; only the stages that have it are read."""
        # Where the loss couples samples, the layout splits operators along "data" too. The cost model knows that axis
        # as replicas only, so that it is given no layout.
        priced_layout = None if layout is None or layouts.batch_is_sharded else layout
        basis = setup.build_cost_model(
            problem, cluster, TrainingOptions.of(plan), None if priced_layout is None else lambda _: priced_layout
        )
        return PlanCost(basis, partition, plan, batch)

    return tuple(scene(layout) for layout in layouts.stages)


def step_at_best(prepared: CompiledTraining, costs: Sequence[PlanCost]) -> Timeline:
    """Return the timeline of a step without communication: ranks wait for other stages' passes only.

    Args:
        prepared: the training, compiled for the plan.
        costs: the cost of every stage, from :func:`price_stages`.
    """
    passes = [scene.pass_costs(stage)[0] for stage, scene in enumerate(costs)]
    return schedule_by_rank(prepared.main_partition, prepared.plan, passes)


def utilization_at_best(prepared: CompiledTraining, costs: Sequence[PlanCost]) -> float:
    """Return the busy fraction (0 to 1) of all ranks in a step without communication; arguments as `step_at_best`.

    A pipeline that is never emptied is as fast as its slowest stage: that of a step amid many others.
    """
    plan = prepared.plan
    if not plan.is_asynchronous:
        return step_at_best(prepared, costs).utilization()
    passes = [scene.pass_costs(stage)[0] for stage, scene in enumerate(costs)]
    # Replicas in turn are at several microbatches at once.
    turns = [plan.degree("data", stage) if plan.takes_turns else 1 for stage in range(plan.pipeline)]
    seconds = [(cost.forward + cost.backward) / parts for cost, parts in zip(passes, turns, strict=True)]
    busy = sum(len(stage.devices) * duration for stage, duration in zip(plan.stages, seconds, strict=True))
    return busy / (plan.workers * max(seconds)) if busy else 0.0


def schedule_by_rank(partition: Partition, plan: Plan, passes: Sequence[PassCosts]) -> Timeline:
    """Return the timeline of a plan's schedule, a lane for every rank.

    Args:
        partition: the graph's stages, with the values that cross between them.
        plan: has the schedule, the microbatches and the ranks of each stage.
        passes: for each stage, seconds of the passes of a microbatch.
    """
    order = stage_graph_of(partition, plan)
    title, notes = f"{plan.spec} · at best", {"stages": str(plan.pipeline)}
    forward, back = ([getattr(cost, name) for cost in passes] for name in ("forward", "backward"))
    halves = [cost.backward_weight for cost in passes] if plan.splits_backward else 0
    halving = [cost.halving / cost.backward if cost.backward else 0.0 for cost in passes]
    if plan.takes_turns:
        played = simulate_replicas(replica_lanes_of(plan, order), forward, back, order, halves, halving=halving)
        return replace(_replicas_by_rank(played, plan), unit="seconds", title=title, notes=notes)
    played = simulate_schedule(lanes_of(plan, order), forward, back, graph=order, weight=halves, halving=halving)
    return replace(lanes_by_rank(played, plan), unit="seconds", title=title, notes=notes)


def _replicas_by_rank(timeline: Timeline, plan: Plan) -> Timeline:
    """Return a timeline with a lane for every rank, from one with a lane for each replica of each group of workers."""
    ranks = list[Sequence[int]]()
    for stage in plan.first_chunks:
        devices, replicas = plan.stages[stage].devices, plan.degree("data", stage)
        size = len(devices) // replicas
        ranks += [devices[replica * size : (replica + 1) * size] for replica in range(replicas)]
    spans = tuple(replace(span, rank=rank) for span in timeline.spans for rank in ranks[span.rank])
    return replace(timeline, spans=spans, ranks=plan.workers)


def lanes_by_rank(timeline: Timeline, plan: Plan) -> Timeline:
    """Return a timeline with a lane for every rank, from one with a lane for each group of workers, who do the same."""
    devices = [stage.devices for stage in plan.stages]
    spans = tuple(replace(span, rank=rank) for span in timeline.spans for rank in devices[span.action.stage])
    return replace(timeline, spans=spans, ranks=plan.workers)


def _share(prepared: CompiledTraining, batch: int) -> str:
    """Describe which fraction of the batch the printed shapes refer to."""
    plan, samples = prepared.plan, prepared.main_partition.graph.samples
    if prepared.main.layouts.batch_is_sharded:
        return f"as many as each replica has of a batch; samples meet, so {plan.data} replicas compute it together"
    # Capture needs a few samples at least: for many small parts the graph has more samples than a worker computes on.
    parts = plan.data * plan.microbatches
    if samples > -(-batch // parts):
        return "no fewer are looked at, though the plan gives a worker fewer at a time"
    unit = "a microbatch" if plan.microbatches > 1 else "the batch"
    return f"a replica's part of {unit}" if plan.data > 1 else unit


def dtypes_of(prepared: CompiledTraining) -> Mapping[str, torch.dtype]:
    """Return the dtypes of values that autocast changes, by node name; capture saw the others."""
    if (dtype := autocast_dtype(prepared.plan.precision)) is None:
        return {}
    return dtypes_under_autocast(prepared.main_partition.graph, accelerator_type() or "cpu", dtype)


def _stages(prepared: CompiledTraining, costs: Sequence[PlanCost], seconds: Sequence[Both]) -> list[dict[str, Any]]:
    partition, plan = prepared.main_partition, prepared.plan
    graph, order = partition.graph, stage_graph_of(partition, plan)
    total = sum(map(sum, seconds)) or 1.0
    stages = []
    for stage, scene in enumerate(costs):
        predicted, (passes, _) = scene.predict_stage(stage), scene.pass_costs(stage)
        live = max(peak_live(lanes_of(plan, order), stage))
        # In graph order, so that the first and the last one are those of the stage.
        nodes = [node for node in graph.nodes if partition.stage_of[node.name] == stage]
        stages.append(
            {
                "stage": stage,
                "mesh": str(plan.degrees(stage)),
                "devices": list(plan.stages[stage].devices),
                "after": list(order.predecessors[stage]),
                "first": nodes[0].name,
                "last": nodes[-1].name,
                "nodes": len(nodes),
                "parameters": count_elements(graph, partition.parameters(stage)),
                "flops": sum(node.flops for node in nodes),
                "time_share": sum(sum(seconds[graph.positions[node.name]]) for node in nodes) / total,
                # Of the busiest rank: seconds of both passes over a microbatch, and bytes. "held" is of all
                # microbatches whose values the stage keeps at once. Memory is that of all stages of its workers.
                "seconds": passes.forward + passes.backward,
                "parameter_bytes": predicted.memory.parameters,
                "gradient_bytes": math.ceil(scene.sharded_load(stage).gradients),
                "live": live,
                "held": math.ceil(live * scene.microbatch_memory(stage).live_bytes),
                "memory": predicted.memory.as_dict(),
            }
        )
    return stages


def _gathers(prepared: CompiledTraining) -> dict[str, Any] | None:
    """Return how many parameters ZeRO-3 gathers in the dtype of the passes; None where it gathers all in their own."""
    plan, graph = prepared.plan, prepared.main_partition.graph
    graphs = [partition.graph for partition in prepared.partitions.values()]
    names = find_cast_weights(graphs, autocast_dtype(plan.precision)) if plan.sync.shard == "parameters" else ()
    trained = [name for name, info in graph.parameters.items() if info.trainable]
    cast = [name for name in trained if name in names]
    sizes = {"cast": count_elements(graph, cast), "parameters": count_elements(graph, trained)}
    return {"dtype": plan.precision, **sizes} if cast else None


def _crossings(partition: Partition) -> list[dict[str, Any]]:
    by_name = {node.name: node for node in partition.graph.nodes}
    return [
        {
            "value": crossing.value,
            "shape": list(by_name[crossing.value].shape),
            "dtype": by_name[crossing.value].dtype,
            "bytes": crossing.bytes,
            "from": crossing.producer,
            "to": list(crossing.consumers),
            "gradient": crossing.requires_grad,
        }
        for crossing in partition.crossings
    ]


def _splits(prepared: CompiledTraining) -> dict[str, dict[str, Any]]:
    """Return how operators are split along each axis (of each mesh), as data and in "lines" for people."""
    splits: dict[str, dict[str, Any]] = {}
    plan, main = prepared.plan, prepared.main_partition
    layouts = prepared.main.layouts
    for layout in layouts.distinct:
        stages = [stage for stage, stage_layout in enumerate(layouts.stages) if stage_layout is layout]
        # The report of a stage's mesh names the operators and parameters of the stages that have this mesh.
        only = {node.name for stage in stages for node in main.nodes(stage)}
        only |= {name for stage in stages for name in main.parameters(stage)}
        # Axes are explained in the order in which they were planned: each sees the splits of the axes before it.
        earlier_splits: dict[str, AxisSplit] = {}
        for axis, split in layout.splits.items():
            shown = view_operators(layout.graph, layout.samples, split.degree)
            explanation = explain(
                CostSetting(shown, split.degree, RankSpeed(), dict(earlier_splits)),
                split,
                enumerate_strategies(shown, split.degree),
                purpose=axis,
                pins=plan.pins(axis, stages),
                whole=layout.whole,
                only=None if plan.is_uniform else only,
            )
            name = (
                axis if plan.is_uniform else f"{axis} on stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            )
            splits[name] = {**asdict(explanation), "stages": stages, "lines": format_explanation(explanation)}
            earlier_splits[axis] = split
    return splits


# Traffic between stages -----------------------------------------------------------------------------------------------


def count_stage_traffic(
    prepared: CompiledTraining, samples: int, dtypes: Mapping[str, torch.dtype]
) -> list[dict[str, Any]]:
    """Return, for each pair of stages between which values cross, the bytes that their ranks send each other.

    Args:
        prepared: the training, compiled for the plan, with placements of all values.
        samples: number of samples of a microbatch.
        dtypes: dtypes by node name, of values whose dtype autocast changed since capture.
    """
    partition, plan = prepared.main_partition, prepared.plan
    travelling = value_specs(partition, dtypes)
    # Rank 0 stands for any: each sender gets its own copy below.
    relays = Resharder(0, plan, partition, prepared.main.layouts, travelling, prepared.main.orders)
    traffic: dict[tuple[int, int], list[int]] = {}
    for crossing in partition.crossings:
        item = travelling[crossing.value].dtype.itemsize
        sent = crossing_as_sent(crossing, plan)
        for consumer in sent.consumers if sent is not None else ():
            counts = traffic.setdefault((crossing.producer, consumer), [0, 0])
            counts[0] += item * _sent(relays, crossing.value, crossing.producer, consumer, samples, False)
            if crossing.requires_grad:
                counts[1] += item * _sent(relays, crossing.value, consumer, crossing.producer, samples, True)
    return [{"from": a, "to": b, "bytes": size, "back": back} for (a, b), (size, back) in sorted(traffic.items())]


def _sent(relays: Resharder, value: str, start: int, end: int, samples: int, gradient: bool) -> int:
    """Return the elements of a value, or of its gradient, that all ranks of a stage send to those of another."""
    total = 0
    for rank, times in _senders(relays, start, end, samples):
        relay = replace(relays, rank=rank)  # shares the boxes that were computed for other ranks
        # Where replicas take turns, the first ones have the first microbatch.
        pieces = (relay.box_to_send(value, peer, samples, gradient) for peer in relays.plan.peers(rank, end, 0))
        total += times * sum(box_volume(piece) for piece in pieces if piece is not None)
    return total


def _senders(relays: Resharder, start: int, end: int, samples: int) -> list[tuple[int, int]]:
    """Return (rank, number of ranks that send as much as it) for a stage.

    Between equal meshes only the numbers of samples differ, so that one replica stands for all of the same size.
    """
    plan, devices = relays.plan, relays.plan.stages[start].devices
    if not plan.takes_turns and (relays.layouts.batch_is_sharded or not plan.have_same_mesh(start, end)):
        return [(rank, 1) for rank in devices]
    replicas = plan.degree("data", start)
    if plan.takes_turns:
        return [(rank, 1) for rank in devices[: len(devices) // replicas]]
    # Local samples of each replica; one without samples computes on a padding sample.
    hand = [max(1, stop - first_sample) for first_sample, stop in split_bounds(samples, plan.shares or replicas)]
    inner, firsts = len(devices) // replicas, {count: hand.index(count) for count in set(hand)}
    return [(r, hand.count(n)) for n, at in firsts.items() for r in devices[at * inner : (at + 1) * inner]]
