"""Keyed random operators on a part of a value: they draw the numbers that the whole value has there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from polylane.graph.precision import UnderSetting
from polylane.graph.sample_slice import SampleSlice, TensorRegion


class RandomInRegion(UnderSetting):
    """A keyed operator whose random value is cut: draws only the numbers of what is in hand.

    Args:
        function: called as ``function(part, salt, batch_dim, ...)``; what it draws has the shape of the piece in hand.
            One that is cut along other dimensions already, by other axes, is cut along this one too.
        dim: the dimension of the random value that is cut, from 0.
        ranges: what is in hand of it, as (start, stop) in ascending order.
        size: of the whole dimension; along the samples, that of this worker's samples.
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
