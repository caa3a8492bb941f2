"""How a plan cuts a model, as plain data: stages, what crosses, how operators are split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from polylane.commands.at_best import lanes, pass_seconds
from polylane.commands.edges import edges
from polylane.commands.held import held
from polylane.commands.totals import elements
from polylane.cost.communicate import Rates
from polylane.cost.profile import Both
from polylane.graph.dtypes import dtypes_under_autocast
from polylane.graph.partition import Partition
from polylane.observe.timeline import Timeline
from polylane.placement.options import options
from polylane.placement.rewrite import Split
from polylane.placement.view import view
from polylane.plan.plan import Plan
from polylane.planner.explain import explain, lines
from polylane.planner.price import Setting
from polylane.runtime.prepare import Prepared
from polylane.runtime.world import accelerator_type
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import live_bound


def cut(prepared: Prepared, seconds: Sequence[Both], batch: int) -> dict[str, Any]:
    """The plan's stages and crossings, and how operators are split, as plain data.

    Args:
        prepared: the plan, and how everything lies.
        seconds: of every node, forward and backward, for as many samples as the graph is shown for.
        batch: samples of a step.
    """
    samples, dtypes = _microbatch(prepared.plan, batch), dtypes_of(prepared)
    return {
        "plan": prepared.plan.spec,
        "workers": prepared.plan.workers,
        "share": _share(prepared, batch),
        "stages": _stages(prepared, seconds, samples, dtypes),
        "edges": edges(prepared, samples, dtypes),
        "utilization": step_at_best(prepared, seconds, batch).utilization(),
        "crossings": _crossings(prepared.main),
        "splits": _splits(prepared),
    }


def step_at_best(prepared: Prepared, seconds: Sequence[Both], batch: int) -> Timeline:
    """The step that the utilization is of, a lane for every rank."""
    return lanes(prepared.main, prepared.plan, seconds, _microbatch(prepared.plan, batch))


def _microbatch(plan: Plan, batch: int) -> int:
    """Samples of the largest one."""
    return -(-batch // plan.microbatches)


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


def dtypes_of(prepared: Prepared) -> Mapping[str, torch.dtype]:
    """Of the values, by node name, as far as they are others than capture saw: autocast changes them."""
    if prepared.plan.precision != "bfloat16":
        return {}
    return dtypes_under_autocast(prepared.main.graph, accelerator_type() or "cpu", torch.bfloat16)


def _stages(
    prepared: Prepared, seconds: Sequence[Both], samples: int, dtypes: Mapping[str, torch.dtype]
) -> list[dict[str, Any]]:
    partition, plan = prepared.main, prepared.plan
    graph, order = partition.graph, StageGraph.of_partition(partition)
    whole = sum(map(sum, seconds)) or 1.0
    found = []
    for stage in range(partition.stages):
        own = [node for node in graph.nodes if partition.stage_of[node.name] == stage]
        live = live_bound(plan.schedule, order, plan.microbatches, stage)
        holds = held(prepared, stage, samples, dtypes)
        found.append(
            {
                "stage": stage,
                "mesh": str(plan.degrees(stage)),
                "devices": list(plan.stages[stage].devices),
                "after": list(order.before[stage]),
                "first": own[0].name,
                "last": own[-1].name,
                "nodes": len(own),
                "parameters": elements(graph, partition.parameters(stage)),
                "flops": sum(node.flops for node in own),
                "time_share": sum(sum(seconds[graph.positions[node.name]]) for node in own) / whole,
                # Of a rank: seconds of both passes over a microbatch, and bytes.
                "seconds": sum(pass_seconds(partition, plan, seconds, samples, stage)),
                "parameter_bytes": holds.parameters,
                "gradient_bytes": holds.gradients,
                "live": live,
                "held": live * holds.values,
            }
        )
    return found


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
