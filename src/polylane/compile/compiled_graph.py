"""Compiled graph: one captured graph, partitioned into stages, with the placements of its operators and batch layouts.

Everything that a plan determines about one graph is computed here once, before any worker binds it: the cuts, how the
operators of every stage are sharded over its mesh, and how the values that cross between stages are split by sample.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polylane.compile.optimizer_probe import UntriedOptimizer
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, align_partition, balance_stages
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import AnyPlan, Plan
from polylane.samples.batch_layout import BatchLayout, batch_layouts, explain_unknown
from polylane.sharding.stage_layouts import (
    SHARED_BY,
    StageLayouts,
    choose_layouts,
    layouts_like,
    tensors_on_unequal_meshes,
)


@dataclass(frozen=True)
class CompiledGraph:
    """One of a model's graphs, compiled for a plan.

    Attributes:
        partition: the graph and its cuts into stages.
        layouts: how the operators of every stage are sharded.
        orders: batch layout of each value that crosses between stages, by its node's name.
    """

    partition: Partition
    layouts: StageLayouts
    orders: Mapping[str, BatchLayout]


def cut_graph(
    graph: Graph,
    plan: AnyPlan,
    main: Partition | None,
    measure: Callable[[], Sequence[float]],
    known_layouts: Mapping[str, BatchLayout],
) -> Partition:
    """Cut a graph into stages: as the first objective's graph is cut, or the plan file says, else balanced by time.

    Args:
        graph: the captured graph that is cut.
        plan: how many stages there are (a Spec), or where they begin (a Plan).
        main: the partition of the first objective's graph; None: this is the first.
        measure: returns the seconds of every node of the graph; called only where times decide.
        known_layouts: batch layouts of the graph's values, as far as they are known.
    """
    # Several objectives share one model: a parameter must be on the same stage in each of their graphs.
    if main is not None:
        return align_partition(main, graph)
    if isinstance(plan, Plan):
        return fit.partition_for(plan, graph)
    if plan.pipeline == 1:
        return Partition(graph, ())
    fit.check_chunks(plan, graph)
    times, staying = measure(), list[str]()
    # Where replicas are resplit between stages, a value of unknown batch layout must not cross: keep it on one stage.
    if plan.resplits_batch:
        staying = [name for name, order in batch_layouts(graph, known_layouts).items() if order is BatchLayout.UNKNOWN]
    return balance_stages(graph, len(plan.meshes), times, [degrees.workers for degrees in plan.meshes], staying)


def compile_graph(
    partition: Partition, plan: Plan, layouts: StageLayouts, known_layouts: Mapping[str, BatchLayout]
) -> CompiledGraph:
    """Find the batch layouts of the values of a graph, where they matter.

    Where all stages have equally many replicas they do not: whatever a value is, each replica sends its own part to the
    same replica of the next stage, as if it were rows of a batch.

    Args:
        partition: the graph and its cuts into stages.
        plan: the plan that the graph is compiled for.
        layouts: how the graph's operators are sharded.
        known_layouts: batch layouts of the graph's values, as far as they are known.

    Raises:
        PolylaneError: a value of unknown batch layout crosses between stages with different numbers of replicas, and
            so cannot be resharded; or replicas that split operators along the batch have unequal shares of it.
    """
    if plan.shares and layouts.batch_is_sharded:
        raise PolylaneError(
            f"{plan.title}: shares: the loss couples samples, and replicas split its operators in equal parts: leave "
            "shares out"
        )
    if not plan.resplits_batch:
        return CompiledGraph(
            partition, layouts, {crossing.value: BatchLayout.SHARDED_BY_SAMPLE for crossing in partition.crossings}
        )
    replicas = [degrees.data for degrees in plan.meshes]
    orders = batch_layouts(partition.graph, known_layouts)
    for crossing in partition.crossings:
        counts = {replicas[stage] for stage in (crossing.producer, *crossing.consumers)}
        if orders[crossing.value] is BatchLayout.UNKNOWN and len(counts) > 1:
            reason = _explain_cannot_cross(partition, known_layouts, crossing.value, sorted(counts))
            raise PolylaneError(f"{plan.title}: {reason}")
    return CompiledGraph(partition, layouts, orders)


def _explain_cannot_cross(
    partition: Partition, known_layouts: Mapping[str, BatchLayout], name: str, replicas: Sequence[int]
) -> str:
    node = partition.graph.nodes[partition.graph.positions[name]]
    line = f" ({node.source})" if node.source else ""
    return (
        f"stages: {name}{line} crosses between stages with {' and '.join(f'data={n}' for n in replicas)}, but how the "
        "samples of a batch make it up is not known, so that it cannot be divided anew: give them the same data, or "
        f"cut elsewhere{explain_unknown(partition.graph, known_layouts, name)}"
    )


def split_operators(
    partitions: Mapping[str, Partition],
    plan: Plan,
    samples: int,
    reasons: Mapping[str, str],
    sampled: Sequence[bool],
) -> dict[str, StageLayouts]:
    """Choose how the operators of every objective's graph are sharded; a parameter has one placement in all of them.

    Args:
        partitions: partitions of every objective's graph, by name.
        plan: the plan, with its meshes and pinned placements.
        samples: number of samples of a microbatch.
        reasons: by name, why every rank must hold a parameter whole.
        sampled: for each leaf of a batch, whether it is split with the samples; empty where the loss does not couple
            samples.

    Raises:
        PolylaneError: a parameter is on stages with different meshes, and cannot be replicated on all of them.
    """
    layouts: dict[str, StageLayouts] = {}
    # A tensor on stages with different meshes has no common sharding, so it is replicated on all of them.
    on_several = tensors_on_unequal_meshes(partitions.values(), plan)
    reasons = {**dict.fromkeys(on_several, SHARED_BY), **reasons}
    for name, partition in partitions.items():
        main_layouts = next(iter(layouts.values()), None)
        # The first objective is solved for; the others take over its placements of parameters and buffers.
        if main_layouts is None:
            layouts[name] = _choose_main_layouts(partition, plan, samples, reasons, sampled)
        else:
            layouts[name] = layouts_like(main_layouts, partition, plan)
        if cut := layouts[name].sharded_names(on_several):
            raise PolylaneError(
                f"{plan.title}: {cut[0]} is on stages with different meshes, but cannot be whole on all of them: give "
                "these stages the same mesh"
            )
    return layouts


def _choose_main_layouts(
    partition: Partition, plan: Plan, samples: int, reasons: Mapping[str, str], sampled: Sequence[bool]
) -> StageLayouts:
    try:
        return choose_layouts(partition, plan, samples, reasons, sampled)
    except PolylaneError as error:
        about, colon, detail = str(error).removeprefix("plan: ").partition(":")
        if not about.startswith("placements"):
            raise
        raise PolylaneError(f"{plan.title}: {about}{colon}{detail}") from error


def warn_of_untried(reasons: Mapping[str, str], plan: Plan) -> None:
    """Warn of parameters that stay whole because their optimizer could not be tried on parts of them."""
    untried = [why for why in reasons.values() if isinstance(why, UntriedOptimizer)]
    if untried and plan.tensor > 1:
        warnings.warn(
            f"{len(untried)} parameters stay whole on every rank of tensor={plan.tensor}, for it is not known whether "
            f"parts of them can be updated apart: {untried[0]}",
            stacklevel=4,
        )
