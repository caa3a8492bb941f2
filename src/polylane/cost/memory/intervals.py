"""Intervals: which nodes of a graph touch which pieces of memory, and the bytes alive at each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Nodes first..end-1 of a graph.
Range = tuple[int, int]

# "First node" of a piece that no node touches.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Intervals:
    """The touches of pieces of memory by nodes, sorted by node (compressed rows, CSR).

    Attributes:
        piece, node: ids of piece and node, one pair for each touch.
        starts: index of each node's first touch; has one entry more than there are nodes.
    """

    piece: Ints
    node: Ints
    starts: Ints

    @classmethod
    def from_nodes(cls, node_pieces: Sequence[Iterable[int]]) -> Intervals:
        """Build from the pieces that each node touches."""
        lists = [sorted(set(pieces)) for pieces in node_pieces]
        counts = np.array([len(pieces) for pieces in lists], dtype=np.int64)
        piece = np.array([p for pieces in lists for p in pieces], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(piece, np.repeat(np.arange(len(lists), dtype=np.int64), counts), starts)

    def in_ranges(self, pieces: Sequence[Range]) -> tuple[Ints, Ints]:
        """Return the touches in some ranges of nodes: pieces, and nodes renumbered consecutively from 0."""
        at, parts, nodes = 0, list[Ints](), list[Ints]()
        for start, end in pieces:
            touches = slice(self.starts[start], self.starts[end])
            parts.append(self.piece[touches])
            nodes.append(self.node[touches] - start + at)
            at += end - start
        return (parts[0], nodes[0]) if len(parts) == 1 else (np.concatenate(parts), np.concatenate(nodes))


def first_and_last(piece: Ints, node: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the first and the last node that touches each piece; touches must be sorted by node."""
    first_nodes, last_nodes = np.full(count, NEVER, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    # numpy keeps the last of repeated assignments: forwards it is the last touch, reversed the first.
    last_nodes[piece] = node
    first_nodes[piece[::-1]] = node[::-1]
    return first_nodes, last_nodes


def alive_bytes(begins: Ints, ends: Ints, size: Floats, count: int) -> Floats:
    """Return the bytes alive at each of ``count`` nodes; a piece lives from begin to end, both included."""
    # Prefix sum of allocations at begins and frees after ends.
    change = np.bincount(begins, size, count + 1) - np.bincount(ends + 1, size, count + 1)
    result: Floats = np.cumsum(change)[:count]
    return result


def slice_ranges(array: Floats, pieces: Sequence[Range]) -> Floats:
    return np.concatenate([array[start:end] for start, end in pieces])
