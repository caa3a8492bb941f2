"""Narrow cuts of a graph: positions where few bytes cross, at which blocks are distinguished, moved and recomputed.

Deep models are chains of blocks, however they are written; fewer bytes are alive between two blocks than inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from polylane.graph.graph import Graph, once_per_graph
from polylane.graph.partition import cut_positions, sum_over_spans, value_spans

MOST = 256  # default limit on the number of narrow positions


def crossing_bytes(graph: Graph, size: Callable[[str], float] | None = None) -> NDArray[np.float64]:
    """Return for every position (and the end) the bytes of activations that a cut there sends forward.

    Args:
        graph: the graph whose positions are measured.
        size: returns the bytes of a node's value by name; default: those of the whole value.
    """
    return sum_over_spans(graph, value_spans(graph, lambda node: node.bytes if size is None else size(node.name)))


def narrow_positions(graph: Graph, staying: Collection[str] = (), most: int = MOST) -> tuple[int, ...]:
    """Return positions, ascending, at which the graph may be cut and fewer bytes cross than around them.

    While there are more than ``most``, those between two narrower ones are dropped.

    Args:
        graph: the graph whose positions are chosen.
        staying: names of values that must not cross.
        most: limit on the number of positions.
    """
    allowed = cut_positions(graph, staying)
    bytes_ = crossing_bytes(graph)[allowed] if allowed else np.zeros(0)
    indices = _local_minima(list(range(len(allowed))), bytes_)
    while len(indices) > most:
        fewer = _local_minima(indices, bytes_)
        if len(fewer) == len(indices):  # all equally narrow: take them evenly
            fewer = [indices[i] for i in np.linspace(0, len(indices) - 1, most).astype(int)]
        indices = fewer
    return tuple(allowed[i] for i in indices)


@once_per_graph
def block_positions(graph: Graph) -> tuple[int, ...]:
    """Return the boundaries of the blocks that are recomputed or gathered as one, both ends of the graph included."""
    return (0, *narrow_positions(graph, most=1 << 30), len(graph.nodes))


def _local_minima(places: Sequence[int], values: NDArray[np.float64]) -> list[int]:
    """Return places that are at most as wide as those on both sides; of a plateau the first, unless all are equal."""
    if len(places) < 3 or len({float(values[p]) for p in places}) == 1:
        return list(places)
    minima = []
    for i, position in enumerate(places):
        left_value = float(values[places[i - 1]]) if i else np.inf
        value = float(values[position])
        right_value = next((float(values[p]) for p in places[i + 1 :] if values[p] != value), np.inf)
        if value < left_value and value < right_value:
            minima.append(position)
    return minima or list(places)
