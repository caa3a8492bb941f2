"""Trained tensors of a worker: what it synchronizes with other replicas, as predictions and byte counts list it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from polylane.cost.network.sync_volume import TrainedTensor
from polylane.cost.plan_cost import PlanCost
from polylane.graph.sparse_gradients import count_exchanged_rows
from polylane.program.program import GradientBucket, Program


def bucket_tensors(scene: PlanCost, program: Program, bucket: GradientBucket) -> list[TrainedTensor]:
    """Return the gradients of a bucket on a worker, in the dtype that the optimizer holds the parameters in.

    Args:
        scene: costs of the plan's stages, with the shards of their parameters.
        program: the program of the worker.
        bucket: one of its buckets, with the ranks that sum it.
    """
    only_replicas = set(bucket.ranks) == set(program.replicas)
    graph, sheet, tensors = scene.partition.graph, scene.sharded_graph(program.stage), list[TrainedTensor]()
    for name in bucket.parameters:
        info, shape = graph.parameters[name], sheet.busiest_shape(f"parameter:{name}")
        item = info.bytes // max(1, math.prod(info.shape))
        samples = scene.batch / len(program.replicas)
        rows = count_exchanged_rows(graph, name, samples) if bucket.is_sparse else None
        tensors.append(TrainedTensor(shape, item, len(bucket.ranks), only_replicas, sparse_rows=rows))
    return tensors


def count_bytes(tensors: Iterable[TrainedTensor]) -> int:
    """Return the bytes of all of these tensors."""
    return sum(tensor.nbytes for tensor in tensors)
