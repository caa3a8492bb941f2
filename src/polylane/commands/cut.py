"""How a plan cuts a model, as plain data: stages, what crosses, how operators are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polylane.graph.graph import Graph, Node
    from polylane.graph.partition import Partition
    from polylane.observe.timeline import Timeline
    from polylane.placement.rewrite import Split
    from polylane.plan.plan import Plan
    from polylane.runtime.prepare import Prepared


def cut(prepared: Prepared, seconds: Sequence[float], batch: int) -> dict[str, Any]:
    """The plan's stages and crossings, and how operators are split, as plain data."""
    return {
        "plan": prepared.plan.spec,
        "workers": prepared.plan.workers,
        "share": _share(prepared, batch),
        "stages": _stages(prepared.main, prepared.plan, seconds),
        "edges": _edges(prepared.main, prepared.plan),
        "utilization": _utilization(prepared.main, prepared.plan, seconds),
        "crossings": _crossings(prepared.main),
        "splits": _splits(prepared),
    }


def _share(prepared: Prepared, batch: int) -> str:
    """Of what the samples that a graph is shown for are a part."""
    plan, samples = prepared.plan, prepared.main.graph.samples
    if prepared.layouts_of(prepared.main).together:
        return f"as many as each replica has of a batch; samples meet, so {plan.data} replicas compute it together"
    parts = plan.data * plan.microbatches
    if samples > -(-batch // parts):
        return "no fewer are looked at, though the plan gives a worker fewer at a time"
    whole = "a microbatch" if plan.microbatches > 1 else "the batch"
    return f"a replica's part of {whole}" if plan.data > 1 else whole


def _stages(partition: Partition, plan: Plan, measured: Sequence[float]) -> list[dict[str, Any]]:
    from polylane.schedule.stage_graph import StageGraph
    from polylane.schedule.synchronous import live_bound

    graph = partition.graph
    seconds = dict(zip((node.name for node in graph.nodes), measured, strict=True))
    whole = sum(measured) or 1.0
    order = StageGraph.of_edges(partition.stages, partition.edges)
    found = []
    for stage in range(partition.stages):
        own = [node for node in graph.nodes if partition.stage_of[node.name] == stage]
        degrees = plan.degrees(stage)
        live = live_bound(plan.schedule, order, plan.microbatches, stage)
        found.append(
            {
                "stage": stage,
                "mesh": str(degrees),
                "devices": list(plan.stages[stage].devices),
                "after": list(order.before[stage]),
                "live": live,
                # The graph is shown for the samples of a replica of the stage with the most.
                "held": held_bytes(own) * live * plan.data // degrees.workers,
                "first": own[0].name,
                "last": own[-1].name,
                "nodes": len(own),
                "parameters": elements(graph, partition.parameters(stage)),
                "flops": sum(node.flops for node in own),
                "time_share": sum(seconds[node.name] for node in own) / whole,
            }
        )
    return found


def _edges(partition: Partition, plan: Plan) -> list[dict[str, Any]]:
    """What goes from stage to stage for each microbatch, and comes back; of all replicas together."""
    found: dict[tuple[int, int], list[int]] = {}
    for crossing in partition.crossings:
        for consumer in crossing.consumers:
            both = found.setdefault((crossing.producer, consumer), [0, 0])
            both[0] += crossing.bytes * plan.data
            both[1] += crossing.bytes * plan.data * crossing.requires_grad
    return [{"from": a, "to": b, "bytes": there, "back": back} for (a, b), (there, back) in sorted(found.items())]


def _utilization(partition: Partition, plan: Plan, measured: Sequence[float]) -> float:
    """Of all workers' time, how much is work in :func:`lanes`."""
    workers = [plan.degrees(stage).workers for stage in range(plan.pipeline)]
    played = lanes(partition, plan, measured)
    work = sum(busy * count for busy, count in zip(played.busy(), workers, strict=True))
    return work / (played.makespan() * sum(workers) or 1.0)


def lanes(partition: Partition, plan: Plan, measured: Sequence[float]) -> Timeline:
    """A step as the measured times let it be at best, a lane for each stage: nothing is waited for but other stages.

    A stage's work is divided evenly over its workers; a backward pass takes twice as long as a forward one.
    """
    from polylane.cost.simulate import play
    from polylane.schedule.stage_graph import StageGraph
    from polylane.schedule.synchronous import schedule_lanes

    order = StageGraph.of_edges(partition.stages, partition.edges)
    work = [0.0] * partition.stages
    for node, seconds in zip(partition.graph.nodes, measured, strict=True):
        work[partition.stage_of[node.name]] += seconds
    workers = [plan.degrees(stage).workers for stage in range(plan.pipeline)]
    # Measured was what a replica has in hand where there are the most replicas.
    each = [seconds * plan.data / count for seconds, count in zip(work, workers, strict=True)]
    played = play(
        schedule_lanes(plan.schedule, order, plan.microbatches),
        [t / 3 for t in each],
        [2 * t / 3 for t in each],
        graph=order,
    )
    return replace(played, unit="seconds", title=f"{plan.spec} · at best", notes={"stages": str(plan.pipeline)})


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


def _splits(prepared: Prepared) -> dict[str, dict[str, Any]]:
    """How the operators are split along each axis (of each mesh), as data and in "lines" for people."""
    from polylane.cost.communicate import Rates
    from polylane.placement.options import options
    from polylane.placement.view import view
    from polylane.planner.explain import explain, lines
    from polylane.planner.price import Setting

    found: dict[str, dict[str, Any]] = {}
    plan, main = prepared.plan, prepared.main
    layouts = prepared.layouts_of(main)
    for layout in layouts.distinct:
        stages = [stage for stage, own in enumerate(layouts.stages) if own is layout]
        only = {node.name for stage in stages for node in main.nodes(stage)}
        only |= {name for stage in stages for name in main.parameters(stage)}
        taken: dict[str, Split] = {}
        for axis, split in layout.splits.items():
            shown = view(layout.graph, layout.samples, split.degree)
            told = explain(
                Setting(shown, split.degree, Rates(), dict(taken)),
                split,
                options(shown, split.degree),
                purpose=axis,
                pins=plan.pins(axis, stages),
                whole=layout.whole,
                only=None if plan.uniform else only,
            )
            name = axis if plan.uniform else f"{axis} on stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            found[name] = {**asdict(told), "stages": stages, "lines": lines(told)}
            taken[axis] = split
    return found


def elements(graph: Graph, names: Any) -> int:
    """How many numbers parameters have."""
    return sum(prod(graph.parameters[name].shape) for name in names)


def held_bytes(nodes: Sequence[Node]) -> int:
    """Of all values that nodes compute."""
    return sum(node.bytes for node in nodes if not node.free)
