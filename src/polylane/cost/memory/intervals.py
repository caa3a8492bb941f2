"""Touches: which pieces of memory are touched at which nodes of a graph, and what is alive at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Nodes first..end-1 of a graph.
Range = tuple[int, int]

# The first node that touches what none does.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Intervals:
    """Which pieces of memory are touched at which nodes, in the order of the nodes.

    Attributes:
        piece, node: of every touch.
        starts: where the touches of every node begin; one more than there are nodes.
    """

    piece: Ints
    node: Ints
    starts: Ints

    @classmethod
    def from_nodes(cls, each: Sequence[Iterable[int]]) -> Intervals:
        """Of every node, the pieces that it touches."""
        lists = [sorted(set(pieces)) for pieces in each]
        counts = np.array([len(pieces) for pieces in lists], dtype=np.int64)
        piece = np.array([p for pieces in lists for p in pieces], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(piece, np.repeat(np.arange(len(lists), dtype=np.int64), counts), starts)

    def in_ranges(self, pieces: Sequence[Range]) -> tuple[Ints, Ints]:
        """The touches at some nodes, in order: pieces, and nodes counted from the first of these nodes on."""
        at, parts, nodes = 0, list[Ints](), list[Ints]()
        for first, end in pieces:
            inside = slice(self.starts[first], self.starts[end])
            parts.append(self.piece[inside])
            nodes.append(self.node[inside] - first + at)
            at += end - first
        return (parts[0], nodes[0]) if len(parts) == 1 else (np.concatenate(parts), np.concatenate(nodes))


def first_and_last(piece: Ints, node: Ints, count: int) -> tuple[Ints, Ints]:
    """Of every piece the first and the last node that touches it, of touches in the order of the nodes."""
    first, last = np.full(count, NEVER, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    last[piece] = node
    first[piece[::-1]] = node[::-1]
    return first, last


def alive_bytes(begins: Ints, ends: Ints, size: Floats, count: int) -> Floats:
    """Bytes that are alive at each of so many nodes: every piece from one node to another, both included."""
    change = np.bincount(begins, size, count + 1) - np.bincount(ends + 1, size, count + 1)
    result: Floats = np.cumsum(change)[:count]
    return result


def slice_ranges(array: Floats, pieces: Sequence[Range]) -> Floats:
    return np.concatenate([array[first:end] for first, end in pieces])
