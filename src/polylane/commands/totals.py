"""Totals: what the nodes and parameters of a graph add up to."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polylane.graph.graph import Graph, Node


def elements(graph: Graph, names: Iterable[str]) -> int:
    """How many numbers parameters have."""
    return sum(prod(graph.parameters[name].shape) for name in names)


def value_bytes(nodes: Iterable[Node]) -> int:
    """Of all values that nodes compute."""
    return sum(node.bytes for node in nodes if not node.free)
