"""Held: the bytes that a rank of a stage has of parameters, of their gradients, and of a microbatch's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from polylane.graph.graph import TensorInfo
from polylane.graph.partition import Partition
from polylane.placement.placement import local_shape
from polylane.placement.view import Sizes
from polylane.planner.layout import Layout
from polylane.runtime.prepare import Prepared


@dataclass(frozen=True)
class Held:
    """Bytes on a rank of a stage, of each sort on the one that has the most.

    Attributes:
        parameters: that the rank holds.
        gradients: of those that are trained.
        values: of one microbatch, all that the stage computes.
    """

    parameters: int
    gradients: int
    values: int


def held(prepared: Prepared, stage: int, samples: int, dtypes: Mapping[str, torch.dtype]) -> Held:
    """What a rank of a stage holds.

    Args:
        prepared: the plan, and how everything lies.
        stage: which one.
        samples: of a microbatch.
        dtypes: of values, by node name, as far as they are others than capture saw.
    """
    plan, partition, layouts = prepared.plan, prepared.main, prepared.layouts_of(prepared.main)
    devices, replicas, layout = plan.stages[stage].devices, plan.degree("data", stage), layouts[stage]
    # The first replica has the most samples; only replicas that split operators, too, have different parts besides.
    ranks = devices if layouts.together else devices[: len(devices) // replicas]
    hand = samples if layouts.together else -(-samples // replicas)
    infos = [(name, partition.graph.parameters[name]) for name in partition.parameters(stage)]
    values = _values(partition, stage, hand, dtypes)
    found = []
    for rank in ranks:
        at = plan.indices(rank)
        parts = [(info.trainable, _part(name, info, layout, at)) for name, info in infos]
        local = (
            prod(shape if layout is None else layout.local(name, shape, hand, at)) * item
            for name, shape, item in values
        )
        found.append((sum(size for _, size in parts), sum(size for trained, size in parts if trained), sum(local)))
    return Held(*map(max, zip(*found, strict=True)))


def _part(name: str, info: TensorInfo, layout: Layout | None, at: Mapping[str, int]) -> int:
    """Bytes of a parameter on one rank."""
    shape = info.shape
    for axis, placement in layout.source("parameter", name).items() if layout is not None else ():
        shape = local_shape(shape, placement, at[axis])
    return info.bytes * prod(shape) // max(prod(info.shape), 1)


def _values(
    partition: Partition, stage: int, hand: int, dtypes: Mapping[str, torch.dtype]
) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, whole shape and bytes of an element of every value of a stage, with so many samples in hand."""
    sizes, nodes = Sizes(hand), partition.graph.code.fx.nodes
    vals = {node.meta["name"]: node.meta["val"] for node in nodes if node.op == "call_function"}
    return [
        (node.name, sizes.shape(val), dtypes.get(node.name, val.dtype).itemsize)
        for node in partition.nodes(stage)
        # Of several tensors that an operator gives, those that are used have nodes of their own.
        if not node.free and isinstance(val := vals[node.name], Tensor)
    ]
