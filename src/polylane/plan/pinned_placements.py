"""Pinned placements: placements of tensors that a plan file fixes; checks their form, and that the graph has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from polylane.errors import PolylaneError, suggest_name
from polylane.graph.partition import Partition

_FORM = re.compile(r"replicate|partial|shard\((?P<dim>0|[1-9][0-9]*)\)")


def read_pattern(value: Any) -> str:
    """Validate a placement as written in a plan file.

    Raises:
        PydanticCustomError: the value is not replicate, shard(<dim>) or partial.
    """
    if not isinstance(value, str) or not _FORM.fullmatch(value):
        raise PydanticCustomError(
            "placement", "{given} is not replicate, shard(<dim>) or partial", {"given": repr(value)}
        )
    return value


# The placements of every stage: name of a parameter or node -> axis -> pattern.
_Placements = Sequence[Mapping[str, Mapping[Any, str]]]


def check_axes(stages: _Placements, axes: Sequence[Collection[str]], title: str) -> None:
    """Refuse placements on axes along which the stage shards nothing: they would be ignored.

    Args:
        stages: the pinned placements of every stage.
        axes: for every stage, the axes along which its operators are sharded.
        title: what errors call the plan.

    Raises:
        PolylaneError: a placement on such an axis; naming the plan's key.
    """
    for index, placements in enumerate(stages):
        for name, on_axes in placements.items():
            for axis in on_axes:
                if axis not in axes[index]:
                    raise PolylaneError(
                        f"{title}: stages.{index}.placements.{name}.{axis}: the stage splits nothing along {axis}: "
                        f"leave it out, or give its mesh an axis {axis} of 2 or more"
                    )


def check_pins(stages: _Placements, partition: Partition, title: str) -> None:
    """Refuse placements of tensors that the stage does not have, or that contradict each other.

    Args:
        stages: the pinned placements of every stage.
        partition: the model's graph and its cuts.
        title: what errors call the plan.

    Raises:
        PolylaneError: an unknown tensor, one of another stage, a dimension that it does not have, or two different
            placements for a tensor on several stages; naming the plan's key.
    """
    # A tied weight is on several stages, whose placements of it must agree: its gradients are added up.
    patterns: dict[tuple[str, str], tuple[int, str]] = {}
    for index, placements in enumerate(stages):
        for name, on_axes in placements.items():
            key = f"{title}: stages.{index}.placements.{name}"
            dims = _count_dims(partition, index, name, key)
            for axis, pattern in on_axes.items():
                match = _FORM.fullmatch(pattern)
                if match is not None and match["dim"] is not None and int(match["dim"]) >= dims:
                    raise PolylaneError(f"{key}.{axis}: {pattern}, but its dimensions are {_numbered(dims)}")
                other_stage, other_pattern = patterns.setdefault((name, axis), (index, pattern))
                if other_pattern != pattern:
                    raise PolylaneError(f"{key}.{axis}: {pattern}, but stage {other_stage} has {other_pattern} for it")


def _numbered(dims: int) -> str:
    return "none" if dims == 0 else ", ".join(map(str, range(dims)))


def _count_dims(partition: Partition, stage: int, name: str, key: str) -> int:
    """Return the number of dimensions of the tensor of that name: a parameter, or what a node returns."""
    graph = partition.graph
    if name in graph.parameters:
        holders = [s for s in range(partition.stages) if name in partition.parameters(s)]
        _check_on_stage(key, holders, stage)
        return len(graph.parameters[name].shape)
    if name in graph.positions:
        _check_on_stage(key, [partition.stage_of[name]], stage)
        return len(graph.nodes[graph.positions[name]].shape)
    if name in graph.tied:
        raise PolylaneError(f"{key}: it is tied to {graph.tied[name]}: name that one")
    hint = suggest_name(name, [*graph.parameters, *graph.positions])
    raise PolylaneError(f"{key}: the model has no parameter and no node of this name{hint}")


def _check_on_stage(key: str, holders: Sequence[int], stage: int) -> None:
    if holders and stage not in holders:  # what only another loss uses is on no stage of this graph
        raise PolylaneError(f"{key}: it is on stage {', '.join(map(str, holders))}")
