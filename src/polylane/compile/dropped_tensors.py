"""Dropped tensors of a plan: what the forward passes of every stage drop, to be recomputed in the backward passes."""

from __future__ import annotations

import torch

from polylane.cost.memory.recompute_choice import dropped_on_stages
from polylane.cost.memory.saved_by_operators import trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting
from polylane.graph.partition import Partition
from polylane.graph.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.plan.plan import Plan
from polylane.plan.recompute import NONE


def find_dropped_tensors(partition: Partition, plan: Plan, trains: bool = True) -> tuple[DroppedTensors, ...]:
    """Return what every stage drops: it follows from the graph and the plan alone, so that all workers find the same.

    Args:
        partition: the graph and its cuts into stages.
        plan: the plan, with its ``recompute`` for all stages or each.
        trains: whether there are backward passes at all.
    """
    modes = [plan.recompute_of(stage) for stage in range(partition.stages)]
    if not trains or (all(mode == NONE for mode in modes) and not partition.graph.checkpoints):
        return (NOTHING_DROPPED,) * partition.stages
    # Replicas sum the statistics of batch normalization in its forward pass, which then cannot run a second time.
    setting = BackendSetting(
        partition.graph.samples,
        autocast=torch.bfloat16 if plan.precision == "bfloat16" else None,
        sync_batch_norm=plan.data > 1,
    )
    return dropped_on_stages(partition, modes, trace_saved_tensors(partition.graph, setting))
