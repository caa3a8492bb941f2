"""Dropped tensors of a plan: what the forward passes of every stage drop, to be recomputed in the backward passes."""

from __future__ import annotations

from polylane.cost.memory.recompute_budget import dropped_on_stages
from polylane.cost.memory.saved_by_operators import saved_on_rank, trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.errors import PolylaneError
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.precision import autocast_dtype
from polylane.plan.local_samples import local_samples
from polylane.plan.plan import Plan
from polylane.plan.recompute import NONE
from polylane.sharding.layout import Layout
from polylane.sharding.stage_layouts import StageLayouts


def find_dropped_tensors(
    partition: Partition,
    plan: Plan,
    layouts: StageLayouts,
    batch: int,
    *,
    device: str = "cpu",
    in_float64: bool = False,
    trains: bool = True,
) -> tuple[DroppedTensors, ...]:
    """Return what every stage drops: it follows from the graph and the plan alone, so that all workers find the same.

    The same as :class:`polylane.cost.plan_cost.PlanCost` prices: of what a rank of the stage saves for its samples.

    Args:
        partition: the graph and its cuts into stages.
        plan: the plan, with its ``recompute`` for all stages or each.
        layouts: how the operators of every stage are sharded.
        batch: number of samples of a step, over all replicas.
        device: backend whose kernels run, "cpu" or "cuda".
        in_float64: whether a training in float32 is proven in float64: budgets hold twice the bytes.
        trains: whether there are backward passes at all.

    Raises:
        PolylaneError: a budget that no choice of tensors fits.
    """
    graph = partition.graph
    modes = [plan.recompute_of(stage) for stage in range(partition.stages)]
    if not trains or (all(mode == NONE for mode in modes) and not graph.checkpoints):
        return (NOTHING_DROPPED,) * partition.stages
    saved_tensors = dict[tuple[object, ...], SavedTensors]()
    keeping = list[SavedTensors]()
    for stage in range(partition.stages):
        # Replicas sum the statistics of batch normalization in its forward pass, which then cannot run a second time.
        synced = plan.degree("data", stage) > 1
        samples = graph.samples if layouts.batch_is_sharded else local_samples(plan, stage, batch)
        key = (id(layouts[stage]), samples, synced)
        if key not in saved_tensors:
            setting = BackendSetting(samples, device, autocast_dtype(plan.precision), sync_batch_norm=synced)
            saved_tensors[key] = _saved_tensors(graph, layouts[stage], setting)
        keeping.append(saved_tensors[key])
    try:
        return dropped_on_stages(partition, modes, keeping, 2.0 if in_float64 else 1.0)
    except PolylaneError as error:
        raise PolylaneError(f"{plan.title}: {error}") from None


def _saved_tensors(graph: Graph, layout: Layout | None, setting: BackendSetting) -> SavedTensors:
    """Return what the operators of a graph save on one rank, which has shards where a layout splits them."""
    if layout is None:
        return trace_saved_tensors(graph, setting)
    calls, splits = layout.at(setting.samples)
    return saved_on_rank(graph, setting, calls, splits, layout.view.aliases)
