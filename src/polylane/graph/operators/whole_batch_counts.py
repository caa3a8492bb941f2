"""Statistics of the whole batch inside the graph of a part: counts, and the part's share of the batch.

A mean over counts (tokens that are not ignored, boxes that are positive) is a total over a count. The total of a batch
is the sum of its parts' totals, but the count must be the whole batch's before a part can be differentiated. In a graph
these operators stand for such numbers. On a whole batch they change nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from torch import fx

from polylane.graph.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import SymbolicSize

OP = "whole_batch"  # the name of the operator in a graph


class CombineParts(StrEnum):
    """How a statistic of the whole batch is made of those of its parts."""

    SUM = "sum"
    MEAN = "mean"  # weighted by the parts' samples
    MAX = "max"
    MIN = "min"


class WholeBatchStatistic:
    """A statistic of the inputs over the whole batch, in the place of the part's own.

    Attributes:
        combine: how the whole batch's value is made of the parts' values.
    """

    __module__ = "polylane"
    __name__ = OP

    def __init__(self, combine: CombineParts) -> None:
        self.combine = combine
        self.key = ""  # the node's own name, once it has one

    def __call__(self, part: SampleSlice, own: Any) -> Any:
        """The whole batch's value.

        Args:
            part: the samples in hand; its ``whole`` gives the value, where they are not the whole batch.
            own: the same statistic of these samples alone.
        """
        return own if part.whole is None else part.whole(self.key, own)


class BatchSize(SymbolicSize):
    """A size that the samples in hand alone do not tell: it depends on those of the whole batch too."""


class WholeSize(BatchSize):
    """A size that follows the number of samples, of the whole batch."""

    def __call__(self, part: SampleSlice) -> Any:
        return self.convert(self.of(part.count_loss_samples))


class BatchShare(BatchSize):
    """How many times as many samples as the part the whole batch has, to some power; 1.0 of a whole batch.

    Attributes:
        power: of that ratio.
    """

    def __init__(self, power: int) -> None:
        super().__init__(lambda samples: 1.0, 1.0)
        self.power = power

    def __call__(self, part: SampleSlice) -> Any:
        return float((part.count_loss_samples / part.samples) ** self.power)


def statistics_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that stand for statistics of the whole batch, in its order."""
    return [node for node in graph.nodes if isinstance(node.target, WholeBatchStatistic)]
