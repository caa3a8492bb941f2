"""Report of a captured graph: totals, and for each module its nodes, parameters, FLOPs and bytes of values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from polylane.graph.graph import Graph, Node


@dataclass(frozen=True)
class Row:
    """The figures of one module, or of several equal ones.

    Attributes:
        module: the user's module path; a ``*`` in it stands for several numbers.
        modules: how many modules of the graph the row sums up.
        nodes: number of operators in the graph.
        parameters: elements of all parameters that the operators read, each counted once.
        flops: floating-point operations of a forward pass.
        bytes: size of all values that the operators compute.
    """

    module: str
    modules: int
    nodes: int
    parameters: int
    flops: int
    bytes: int


def count_elements(graph: Graph, names: Iterable[str]) -> int:
    """Return the number of elements of some parameters."""
    return sum(prod(graph.parameters[name].shape) for name in names)


def value_bytes(nodes: Iterable[Node]) -> int:
    """Return the bytes of all values that nodes compute; those of sizes and constants alone do not count."""
    return sum(node.bytes for node in nodes if not node.recomputable)


def describe(graph: Graph) -> dict[str, Any]:
    """Return the report as plain data: totals, every module, and what could not be captured."""
    return {
        "samples": graph.samples,
        "nodes": len(graph.nodes),
        "parameters": count_elements(graph, graph.parameters),
        "trainable": count_elements(graph, [name for name, info in graph.parameters.items() if info.trainable]),
        "flops": sum(node.flops for node in graph.nodes),
        "bytes": value_bytes(graph.nodes),
        "loss": "a mean over samples" if graph.loss_is_mean else "polylane.Mean",
        "opaque": graph.is_opaque,
        "tied": graph.tied,
        "notes": list(graph.notes),
        "modules": [asdict(row) for row in rows(graph)],
    }


def rows(graph: Graph, depth: int | None = None, stars: int | None = None) -> list[Row]:
    """Return a row for every module that has operators, in order of first use.

    Args:
        graph: the captured model and loss.
        depth: sum up modules that are deeper than this many names of a path; None: none are.
        stars: sum up modules whose paths differ in no more than this many of their first numbers, as in blocks.*.mlp.0;
            0: in any of them; None: no modules are summed up so.
    """
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        path = ".".join(node.module.split(".")[:depth])
        # Numbers that are whole components of the path, such as the 3 of layers.3.mlp.
        name = path if stars is None else re.sub(r"(?<![^.])\d+(?![^.])", "*", path, count=stars)
        groups.setdefault(name, []).append(node)
    return [
        Row(
            module,
            len({".".join(node.module.split(".")[:depth]) for node in nodes}),
            len(nodes),
            count_elements(graph, {name for node in nodes for name in node.parameters}),
            sum(node.flops for node in nodes),
            value_bytes(nodes),
        )
        for module, nodes in groups.items()
    ]


def readable_rows(graph: Graph, limit: int = 40) -> list[Row]:
    """Return rows that fit on a screen: of all modules, or with equal ones summed up, or of the upper levels only.

    Args:
        graph: the captured model and loss.
        limit: largest number of rows, where any depth has so few.
    """
    deepest = max(node.module.count(".") + 1 for node in graph.nodes)
    # From the finest to the coarsest: a level of the path is given up only where stars do not shorten the table enough.
    for depth in range(deepest, 0, -1):
        for stars in (None, 1, 0):
            table = rows(graph, depth, stars)
            if len(table) <= limit:
                return table
    return table
