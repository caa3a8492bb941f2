"""Whole-batch statistics inside the graph of a slice: counts over all samples, and the slice's share of them.

A mean over counts (tokens that are not ignored, positive boxes) is a total over a count. The total of a batch is the
sum of its slices' totals, but the count must be the whole batch's before a slice can be differentiated. These operators
stand for such numbers in a graph. On a whole batch they change nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from torch import fx

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import SymbolicSize

OP = "whole_batch"  # the name of the operator in a graph


class CombineParts(StrEnum):
    """How a statistic of the whole batch follows from those of its slices."""

    SUM = "sum"
    MEAN = "mean"  # weighted by the slices' samples
    MAX = "max"
    MIN = "min"
    SAME = "same"  # equal for all slices, as they are before the step's first pass


class WholeBatchStatistic:
    """A statistic of the inputs over the whole batch, in place of the slice's own.

    Attributes:
        combine: how the whole batch's value follows from the slices' values.
    """

    __module__ = "polylane"
    __name__ = OP

    def __init__(self, combine: CombineParts) -> None:
        self.combine = combine
        self.key = ""  # the node's user-facing name, set by samples/counts.py

    def __call__(self, part: SampleSlice, local_value: Any) -> Any:
        """Return the whole batch's value.

        Args:
            part: the local samples; its ``whole`` gives the value, unless they are the whole batch.
            local_value: the same statistic over the local samples alone.
        """
        return local_value if part.whole is None else part.whole(self.key, local_value)


class BatchSize(SymbolicSize):
    """A size that does not follow from the local samples alone, but from the whole batch."""


class WholeSize(BatchSize):
    """A size that follows the number of samples of the whole batch."""

    def __call__(self, part: SampleSlice) -> Any:
        return self.convert(self.function(part.count_loss_samples, *part.open_sizes))


class BatchShare(BatchSize):
    """The ratio of the whole batch's samples to the slice's, to some power; 1.0 for a whole batch.

    Attributes:
        power: exponent of the ratio, an integer.
    """

    def __init__(self, power: int) -> None:
        super().__init__(lambda samples, *sizes: 1.0, 1.0)
        self.power = power

    def __call__(self, part: SampleSlice) -> Any:
        return float((part.count_loss_samples / part.samples) ** self.power)


def statistics_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph that stand for statistics of the whole batch, in order."""
    return [node for node in graph.nodes if isinstance(node.target, WholeBatchStatistic)]
