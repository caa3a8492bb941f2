"""Report of a captured graph: totals, and what every module has of nodes, parameters, operations and values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from polylane.graph.graph import Graph, Node


@dataclass(frozen=True)
class Row:
    """A module, or several alike.

    Attributes:
        module: the user's module path; a ``*`` in it stands for several numbers.
        modules: how many modules of the graph it sums up.
        nodes: operators.
        parameters: elements of the parameters that it reads, each once.
        flops: of a forward pass.
        bytes: of all values that it computes.
    """

    module: str
    modules: int
    nodes: int
    parameters: int
    flops: int
    bytes: int


def count_elements(graph: Graph, names: Iterable[str]) -> int:
    """How many numbers some parameters have."""
    return sum(prod(graph.parameters[name].shape) for name in names)


def value_bytes(nodes: Iterable[Node]) -> int:
    """Bytes of all values that nodes compute."""
    return sum(node.bytes for node in nodes if not node.recomputable)


def describe(graph: Graph) -> dict[str, Any]:
    """What was captured, as plain data: totals, every module, and what could not be captured."""
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
    """A row for every module with operators, in order of first use.

    Args:
        graph: what was captured.
        depth: sum up what lies deeper than so many names of a path; default: nothing.
        stars: sum up modules whose paths differ in no more than so many of their first numbers, as in blocks.*.mlp.0;
            0: in all of them.
    """
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        path = ".".join(node.module.split(".")[:depth])
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


def readable_rows(graph: Graph, most: int = 40) -> list[Row]:
    """As many details as a screen holds: all modules, or alike ones together, or only the upper ones."""
    deepest = max(node.module.count(".") + 1 for node in graph.nodes)
    for depth in range(deepest, 0, -1):
        for stars in (None, 1, 0):
            found = rows(graph, depth, stars)
            if len(found) <= most:
                return found
    return found
