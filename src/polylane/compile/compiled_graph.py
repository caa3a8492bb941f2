"""Compiled graph: one captured graph, cut into stages, with the placement of its operators and of its samples.

All that a plan says of one graph is found here once, before any worker binds it: how the operators of every stage are
split over its mesh, and how the parts of a batch make up the values that cross between stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from polylane.compile.optimizer_probe import UntriedOptimizer
from polylane.errors import PolylaneError
from polylane.graph.batch import clone_leaves
from polylane.graph.capture.export import Loss
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, align_partition, balance_stages
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.profiling.time_operators import measure
from polylane.samples.batch_layout import BatchLayout, MeasuredLayouts, batch_layouts, explain_unknown
from polylane.sharding.stage_layouts import (
    SHARED_BY,
    StageLayouts,
    choose_layouts,
    layouts_like,
    tensors_on_unequal_meshes,
)


@dataclass(frozen=True)
class CompiledGraph:
    """One of a model's graphs, as a plan runs it.

    Attributes:
        partition: the graph and its cuts.
        layouts: how the operators of every stage are split.
        orders: how the parts of a batch make up each value that crosses between stages, by its node's name.
    """

    partition: Partition
    layouts: StageLayouts
    orders: Mapping[str, BatchLayout]


def cut_graph(
    graph: Graph,
    model: nn.Module,
    loss: Loss,
    leaves: list[Any],
    plan: Spec | Plan,
    main: Partition | None,
    seconds: Callable[[Graph, Loss, list[Any]], tuple[float, ...]] | None,
    seen: MeasuredLayouts,
) -> Partition:
    """Cut a graph into stages: as another objective's graph or the plan's file says, else into equally long ones.

    Args:
        graph: what is cut.
        model: the user's, for measuring.
        loss: the user's, for measuring.
        leaves: of a batch, for measuring.
        plan: how many stages there are, or where they begin.
        main: the partition of the first objective's graph; None: this is the first.
        seconds: time of every node of a graph; default: measured here, node by node.
        seen: what is known of the parts of a batch in the graph's values.
    """
    if main is not None:
        return align_partition(main, graph)
    if isinstance(plan, Plan):
        return fit.partition_for(plan, graph)
    if plan.pipeline == 1:
        return Partition(graph, ())
    times = seconds(graph, loss, leaves) if seconds is not None else measure(graph, model, loss, clone_leaves(leaves))
    staying: list[str] = []
    if plan.resplits_batch:
        staying = [name for name, order in batch_layouts(graph, seen).items() if order is BatchLayout.UNKNOWN]
    return balance_stages(graph, plan.pipeline, times, [degrees.workers for degrees in plan.meshes], staying)


def compile_graph(partition: Partition, plan: Plan, layouts: StageLayouts, seen: MeasuredLayouts) -> CompiledGraph:
    """Find how the samples of a batch lie in the values of a graph, where that matters.

    Where all stages have as many replicas it does not: whatever a value is, each replica's part of it stays with that
    replica, and is taken for its rows.

    Args:
        partition: the graph and its cuts.
        plan: how the training is split.
        layouts: how the graph's operators are split.
        seen: what is known of the parts of a batch in the graph's values.

    Raises:
        PolylaneError: a value crosses between stages with different numbers of replicas, and cannot be divided anew.
    """
    if not plan.resplits_batch:
        return CompiledGraph(
            partition, layouts, {crossing.value: BatchLayout.SHARDED_BY_SAMPLE for crossing in partition.crossings}
        )
    replicas = [degrees.data for degrees in plan.meshes]
    orders = batch_layouts(partition.graph, seen)
    for crossing in partition.crossings:
        counts = {replicas[stage] for stage in (crossing.producer, *crossing.consumers)}
        if orders[crossing.value] is BatchLayout.UNKNOWN and len(counts) > 1:
            told = _explain_cannot_cross(partition, seen, crossing.value, sorted(counts))
            raise PolylaneError(f"{plan.title}: {told}")
    return CompiledGraph(partition, layouts, orders)


def _explain_cannot_cross(partition: Partition, seen: MeasuredLayouts, name: str, replicas: Sequence[int]) -> str:
    node = partition.graph.nodes[partition.graph.positions[name]]
    line = f" ({node.source})" if node.source else ""
    return (
        f"stages: {name}{line} crosses between stages with {' and '.join(f'data={n}' for n in replicas)}, but how the "
        "samples of a batch make it up is not known, so that it cannot be divided anew: give them the same data, or "
        f"cut elsewhere{explain_unknown(partition.graph, seen, name)}"
    )


def split_operators(
    partitions: Mapping[str, Partition],
    plan: Plan,
    samples: int,
    whole: Mapping[str, str],
    sampled: Sequence[bool],
) -> dict[str, StageLayouts]:
    """Choose how the operators of every objective's graph are split; parameters lie alike in all of them.

    Args:
        partitions: of every objective's graph, by name.
        plan: how the training is split.
        samples: of a microbatch.
        whole: parameters that every rank must hold whole, and why.
        sampled: which leaves of a batch are split with the samples; empty where samples do not meet in a loss.

    Raises:
        PolylaneError: a parameter is on stages with different meshes, and cannot be whole on all of them.
    """
    layouts: dict[str, StageLayouts] = {}
    on_several = tensors_on_unequal_meshes(partitions.values(), plan)
    whole = {**dict.fromkeys(on_several, SHARED_BY), **whole}
    for name, partition in partitions.items():
        first = next(iter(layouts.values()), None)
        if first is None:
            layouts[name] = _choose_main_layouts(partition, plan, samples, whole, sampled)
        else:
            layouts[name] = layouts_like(first, partition, plan)
        if cut := layouts[name].sharded_names(on_several):
            raise PolylaneError(
                f"{plan.title}: {cut[0]} is on stages with different meshes, but cannot be whole on all of them: give "
                "these stages the same mesh"
            )
    return layouts


def _choose_main_layouts(
    partition: Partition, plan: Plan, samples: int, whole: Mapping[str, str], sampled: Sequence[bool]
) -> StageLayouts:
    try:
        return choose_layouts(partition, plan, samples, whole, sampled)
    except PolylaneError as error:
        about, colon, rest = str(error).removeprefix("plan: ").partition(":")
        if not about.startswith("placements"):
            raise
        raise PolylaneError(f"{plan.title}: {about}{colon}{rest}") from error


def warn_of_untried(whole: Mapping[str, str], plan: Plan) -> None:
    """Tell the user of parameters that stay whole because their optimizer could not be tried on parts of them."""
    untried = [why for why in whole.values() if isinstance(why, UntriedOptimizer)]
    if untried and plan.tensor > 1:
        warnings.warn(
            f"{len(untried)} parameters stay whole on every rank of tensor={plan.tensor}, for it is not known whether "
            f"parts of them can be updated apart: {untried[0]}",
            stacklevel=4,
        )
