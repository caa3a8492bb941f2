"""Backward steps: the moments of a backward pass over any range of nodes, and the bytes of gradients alive at each.

A node's moments are those in which its operators run, each followed by the sums that autograd makes when the operator
is over. Moments are numbered as nodes are: in a backward pass time runs downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cost.memory import intervals
from polylane.cost.memory.gradient_flow import GradientFlow, Step
from polylane.cost.memory.intervals import Floats, Intervals, Ints, Range


@dataclass(frozen=True)
class StageSteps:
    """The moments of a stage's backward pass.

    Attributes:
        node: by moment the stage's node.
        runs: whether an operator runs in it; else a sum is made.
        over: by node of the stage, its last moment in which an operator runs: what the node frees is free afterwards.
        begin: by node of the stage, its first moment, of the highest number.
        gradients: bytes of the stage's gradients alive at each moment.
        made: bytes of those that are made there.
        pieces: the pieces of memory in which they are.
        ends: by piece the last moment of its life, of the lowest number.
        sizes: bytes of each piece that are counted here; 0 for received ones.
    """

    node: Ints
    runs: NDArray[np.bool_]
    over: Ints
    begin: Ints
    gradients: Floats
    made: Floats
    pieces: Ints
    ends: Ints
    sizes: Floats

    def alive_until(self, nodes: Ints, size: Floats) -> Floats:
        """Return the bytes alive at each moment of what is there from the start, and free once these nodes have run."""
        return intervals.alive_bytes(self.over[nodes], np.full(len(nodes), len(self.node) - 1), size, len(self.node))

    def alive_between(self, ends: Ints, begins: Ints, size: Floats) -> Floats:
        """Return the bytes alive at each moment of what is there when nodes ``begins`` run, until ``ends`` have run."""
        return intervals.alive_bytes(self.over[ends], self.begin[begins], size, len(self.node))

    def alive_after(self, nodes: Ints, size: Floats) -> Floats:
        """Return the bytes alive at each moment of what is there to the end, once these nodes have run."""
        return self._alive_to_the_end(self.over[nodes] - 1, size)

    def gradients_kept(self, pieces: Ints) -> Floats:
        """Return the bytes alive at each moment, beyond the gradients that are, if these pieces live to the end."""
        lookup = np.zeros(max(self.pieces.max(initial=-1), pieces.max(initial=-1)) + 1, dtype=bool)
        lookup[pieces] = True
        mask = lookup[self.pieces]
        return self._alive_to_the_end(self.ends[mask] - 1, self.sizes[mask])

    def _alive_to_the_end(self, begins: Ints, size: Floats) -> Floats:
        return intervals.alive_bytes(np.zeros(len(begins), dtype=np.int64), begins, size, len(self.node))


class BackwardSteps:
    """The moments of a backward pass over a whole graph.

    Args:
        flow: the gradients of the pass.
        count: number of the graph's nodes.
    """

    def __init__(self, flow: GradientFlow, count: int) -> None:
        node_steps = [flow.steps.get(i, [Step(runs=True)])[::-1] for i in range(count)]
        moments = [step for steps in node_steps for step in steps]
        self._starts: Ints = np.concatenate([[0], np.cumsum([len(steps) for steps in node_steps])]).astype(np.int64)
        self._touches = Intervals.from_nodes([step.pieces for step in moments])
        self._added = Intervals.from_nodes([[] if step.added_to is None else [step.added_to] for step in moments])
        self._read = Intervals.from_nodes([flow.result_pieces.get(i, ()) for i in range(count)])
        self._node: Ints = np.repeat(np.arange(count, dtype=np.int64), np.diff(self._starts))
        self._runs = np.array([step.runs for step in moments], dtype=bool)
        lowest = [next(i for i, step in enumerate(steps) if step.runs) for steps in node_steps]
        self._over: Ints = self._starts[:-1] + np.array(lowest, dtype=np.int64)
        self.sizes: Floats = np.array(flow.sizes, dtype=np.float64)
        self._ends = np.array(flow.is_parameter_gradient, dtype=bool)
        first_at, last_at = intervals.first_and_last(self._touches.piece, self._touches.node, len(self.sizes))
        touched = last_at >= 0
        # Of pieces that a node touches, the lowest and the highest node that does.
        self._lowest, self._highest = np.zeros_like(first_at), np.zeros_like(last_at)
        self._lowest[touched], self._highest[touched] = self._node[first_at[touched]], self._node[last_at[touched]]

    def of_stage(self, pieces: Sequence[Range], local: Ints) -> StageSteps:
        """Return the moments of a stage.

        Args:
            pieces: the stage's ranges of nodes.
            local: by node of the graph its number in the stage; -1 for others.
        """
        ranges = [(int(self._starts[start]), int(self._starts[end])) for start, end in pieces]
        shift = np.cumsum([0, *(end - start for start, end in ranges)])
        moved = [start - at for (start, _), at in zip(ranges, shift, strict=False)]
        over, begin = (
            np.concatenate([array[a:b] - by for (a, b), by in zip(pieces, moved, strict=True)])
            for array in (self._over, self._starts[1:] - 1)
        )
        count = int(shift[-1])
        touched, at = self._touches.in_ranges(ranges)
        first_at, last_at = intervals.first_and_last(touched, at, len(self.sizes))
        ids = np.flatnonzero(last_at >= 0)
        lowest, highest = self._lowest[ids], self._highest[ids]
        goes = (local[lowest] < 0) & ~self._ends[ids]  # sent to an earlier stage: alive until the pass ends
        ends = np.where(goes, 0, first_at[ids])
        # A gradient that comes from a later stage counts as received, not as made here. Who sent the backward pass on
        # holds it, so that the first gradient that is added to it makes new memory; so does handing it on as it is.
        is_read = np.zeros(len(self.sizes), dtype=bool)
        is_read[self._read.in_ranges(pieces)[0]] = True
        received = (local[highest] < 0) & is_read[ids]
        added = intervals.first_and_last(*self._added.in_ranges(ranges), len(self.sizes))[1][ids]
        copied = np.where(added >= 0, added, np.where(goes, first_at[ids], -1))
        begins = np.where(received, copied, last_at[ids])
        size = np.where(begins < 0, 0.0, self.sizes[ids])
        begins = np.maximum(begins, ends)
        return StageSteps(
            node=local[np.concatenate([self._node[a:b] for a, b in ranges])],
            runs=np.concatenate([self._runs[a:b] for a, b in ranges]),
            over=over,
            begin=begin,
            gradients=intervals.alive_bytes(ends, begins, size, count),
            made=np.asarray(np.bincount(begins, size, count), dtype=np.float64),
            pieces=ids,
            ends=ends,
            sizes=size,
        )
