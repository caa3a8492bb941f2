"""Keyed random numbers of a shard: a rank draws exactly the numbers that the whole value has at its positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from polylane.graph.nodes.facts import UnderSetting
from polylane.graph.nodes.sample_slice import SampleSlice, TensorRegion
from polylane.placement.strategy import RankCall


class RandomInRegion(UnderSetting):
    """A keyed operator with a sharded random value: draws only the numbers of the local part.

    Args:
        function: called as ``function(part, salt, batch_dim, ...)``; it draws a value of the local shape. If other axes
            have sharded it already along other dimensions, this dimension is added.
        dim: index of the random value's sharded dimension, from 0.
        ranges: the local positions of that dimension, as (start, stop) in ascending order.
        size: length of the whole dimension; along the samples, that of this worker's samples.
    """

    region: TensorRegion

    def __init__(self, function: Callable[..., Any], dim: int, ranges: Sequence[tuple[int, int]], size: int) -> None:
        cuts = {dim: (dim, size, tuple(ranges))}
        if isinstance(function, RandomInRegion):
            cuts |= {cut[0]: cut for cut in function.region.cuts}
            if len(cuts) == len(function.region.cuts):
                raise ValueError(f"dimension {dim} is cut twice")
            function = function.target
        super().__init__(function)
        self.region = TensorRegion(tuple(cuts[d] for d in sorted(cuts)))

    def __call__(self, part: SampleSlice, *args: Any, **kwargs: Any) -> Any:
        return self.target(dataclasses.replace(part, region=self.region), *args, **kwargs)


def draw_locally(edit: RankCall) -> None:
    """Let a rank's call draw the random numbers of its part of the output, which has the random value's dimensions."""
    cut = edit.output_shard()
    edit.target = RandomInRegion(edit.target, cut.dim, cut.ranges(edit.index), cut.size)
