"""Batch layout: how the parts of a batch make up a value: sharded by sample, replicated, a mean or a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor, fx

from polylane.graph.capture.export import format_line
from polylane.graph.graph import Graph, Node
from polylane.graph.partition import Partition


class BatchLayout(StrEnum):
    """How the parts' values make up the value of the whole batch."""

    SHARDED_BY_SAMPLE = "rows"  # concatenated along the dimension of the samples
    REPLICATED = "alike"  # equal for all parts
    MEAN = "mean"  # mean of the parts, weighted by their samples
    SUM = "sum"
    UNKNOWN = "other"


@dataclass(frozen=True)
class MeasuredLayouts:
    """Batch layouts of a graph's values, as far as they are known.

    Attributes:
        layouts: node name -> batch layout of its value; values of unknown layout are missing.
    """

    layouts: Mapping[str, BatchLayout] = field(default_factory=dict)


def batch_layouts(graph: Graph, seen: MeasuredLayouts) -> dict[str, BatchLayout]:
    """Return the batch layout of every value of a graph by node name.

    A floating-point value that is equal for all parts but depends on the samples counts as a mean: it may be equal by
    chance (a zero at the start), and the mean of equal values is the same value. Values missing in ``seen`` are
    UNKNOWN.
    """
    code, moving, result = graph.code.fx, set[fx.Node](), dict[str, BatchLayout]()
    names = {node.id: node.name for node in graph.nodes}
    for node in code.nodes:
        is_input = node.op == "placeholder" and node.meta["role"][0] == "input"
        if is_input or any(used in moving for used in node.all_input_nodes):
            moving.add(node)
        if node.op != "call_function":
            continue
        val = node.meta.get("val")
        continuous = isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())
        order = seen.layouts.get(names[node.name], BatchLayout.UNKNOWN)
        # Integers and booleans stay replicated: their mean is no value of their type.
        chance = order is BatchLayout.REPLICATED and node in moving and continuous
        result[names[node.name]] = BatchLayout.MEAN if chance else order
    return result


def explain_unknown(graph: Graph, seen: MeasuredLayouts, name: str) -> str:
    """Explain why a value's layout is not known, as the end of a sentence; "" if it is known.

    The explanation names the first operator of unknown layout on the way to the value.
    """
    if name in seen.layouts:
        return ""
    node = graph.nodes[graph.positions[name]]
    while before := _unknown_inputs(graph, seen, node):
        node = before[0]
    return f": no rule says of {node.name}{format_line(node.source)} that it keeps them in order"


def _unknown_inputs(graph: Graph, seen: MeasuredLayouts, node: Node) -> list[Node]:
    before = [graph.nodes[graph.positions[name]] for name in node.inputs if name not in seen.layouts]
    return [other for other in before if other.op != "size"]


def hash_crossing_layouts(partition: Partition, orders: Mapping[str, BatchLayout]) -> str:
    """Return a hash of the layouts of all crossing values, which must be equal on all workers."""
    crossing = [(crossing.value, str(orders[crossing.value])) for crossing in partition.crossings]
    return hashlib.sha256(repr(crossing).encode()).hexdigest()[:16]
