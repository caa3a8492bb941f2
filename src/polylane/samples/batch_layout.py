"""How the parts of a batch make up a value: in their order, alike, as a mean or a sum; by node name."""

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
    """How the parts of a batch make up a value of the whole."""

    SHARDED_BY_SAMPLE = "rows"  # one after another along the dimension of the samples
    REPLICATED = "alike"  # the same for any samples
    MEAN = "mean"  # in their mean, weighted by their samples
    SUM = "sum"
    UNKNOWN = "other"


@dataclass(frozen=True)
class MeasuredLayouts:
    """What is known of a graph's values.

    Attributes:
        layouts: how the parts make up each value, by node name; nothing is known of those that are missing.
    """

    layouts: Mapping[str, BatchLayout] = field(default_factory=dict)


def batch_layouts(graph: Graph, seen: MeasuredLayouts) -> dict[str, BatchLayout]:
    """How the parts of a batch make up every value of a graph, by node name.

    What is the same for parts of one batch counts as their mean if it depends on them: it may be so by chance (a zero
    at the start), and a mean of what is alike is the same again. What nobody knows is in no order.
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
        chance = order is BatchLayout.REPLICATED and node in moving and continuous
        result[names[node.name]] = BatchLayout.MEAN if chance else order
    return result


def explain_unknown(graph: Graph, seen: MeasuredLayouts, name: str) -> str:
    """Why a value's order is not known, as the end of a sentence; "" where it is known to be none of those there are.

    It names the operator at which what is not known begins.
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
    """A number of how the values that cross are divided: workers that looked apart must have seen alike."""
    crossing = [(crossing.value, str(orders[crossing.value])) for crossing in partition.crossings]
    return hashlib.sha256(repr(crossing).encode()).hexdigest()[:16]
