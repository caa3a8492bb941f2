"""Narrow places of a graph: where few bytes cross, so that blocks between them can be told apart, moved and recomputed.

Deep models are chains of blocks, whatever their authors call them; between two blocks less is alive than inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from polylane.graph.graph import Graph
from polylane.graph.partition import cut_positions, last_uses

MOST = 256


def crossing_bytes(graph: Graph, size: Callable[[str], float] | None = None) -> NDArray[np.float64]:
    """For every position (and the end), the bytes of the values that a cut there would make travel forward.

    Args:
        graph: what would be cut.
        size: bytes of a node's value, where it is not whole.
    """
    delta = np.zeros(len(graph.nodes) + 1)
    for name, end in last_uses(graph).items():
        start = graph.positions[name]
        if not graph.nodes[start].recomputable and end > start:
            moved = graph.nodes[start].bytes if size is None else size(name)
            delta[start + 1] += moved
            delta[end + 1] -= moved
    return np.cumsum(delta)


def narrow_positions(graph: Graph, staying: Collection[str] = (), most: int = MOST) -> tuple[int, ...]:
    """Positions at which the graph may be cut and less crosses than around them; ascending.

    Where there are more than ``most``, those between two narrower ones go, until they are few enough.

    Args:
        graph: what would be cut.
        staying: values that must not cross.
        most: about how many are wanted.
    """
    allowed = cut_positions(graph, staying)
    bytes_ = crossing_bytes(graph)[allowed] if allowed else np.zeros(0)
    kept = _local_minima(list(range(len(allowed))), bytes_)
    while len(kept) > most:
        fewer = _local_minima(kept, bytes_)
        if len(fewer) == len(kept):  # all alike: evenly
            fewer = [kept[i] for i in np.linspace(0, len(kept) - 1, most).astype(int)]
        kept = fewer
    return tuple(allowed[i] for i in kept)


def _local_minima(places: Sequence[int], values: NDArray[np.float64]) -> list[int]:
    """Places that are at most as wide as those on both sides; of a plateau the first, unless all is one."""
    if len(places) < 3 or len({float(values[p]) for p in places}) == 1:
        return list(places)
    found = []
    for i, place in enumerate(places):
        before = float(values[places[i - 1]]) if i else np.inf
        own = float(values[place])
        after = next((float(values[p]) for p in places[i + 1 :] if values[p] != own), np.inf)
        if own < before and own < after:
            found.append(place)
    return found or list(places)
