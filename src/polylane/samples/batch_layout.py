"""Batch layout: how the parts of a batch make up a value: sharded by sample, replicated, a mean or a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum

from torch import Tensor, fx

from polylane.graph.graph import Graph, Node
from polylane.graph.nodes.user_lines import format_line
from polylane.graph.partition import Partition


class BatchLayout(StrEnum):
    """How the parts' values make up the value of the whole batch."""

    SHARDED_BY_SAMPLE = "rows"  # concatenated along the dimension of the samples
    REPLICATED = "alike"  # equal for all parts
    MEAN = "mean"  # mean of the parts, weighted by their samples
    SUM = "sum"
    UNKNOWN = "other"


def batch_layouts(graph: Graph, layouts: Mapping[str, BatchLayout]) -> dict[str, BatchLayout]:
    """Return the batch layout of every value of a graph by node name.

    A floating-point value that is equal for all parts but depends on the samples counts as a mean: it may be equal by
    chance (a zero at the start), and the mean of equal values is the same value. Values missing in ``layouts`` are
    UNKNOWN.
    """
    moving, result = set[fx.Node](), dict[str, BatchLayout]()
    for node in graph.code.fx.nodes:
        is_input = node.op == "placeholder" and node.meta["role"][0] == "input"
        if is_input or any(used in moving for used in node.all_input_nodes):
            moving.add(node)
        if node.op != "call_function":
            continue
        name, val = str(node.meta["name"]), node.meta.get("val")
        continuous = isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())
        order = layouts.get(name, BatchLayout.UNKNOWN)
        # Integers and booleans stay replicated: their mean is no value of their type.
        chance = order is BatchLayout.REPLICATED and node in moving and continuous
        result[name] = BatchLayout.MEAN if chance else order
    return result


def explain_unknown(graph: Graph, layouts: Mapping[str, BatchLayout], name: str) -> str:
    """Explain why a value's layout is not known, as the end of a sentence; "" if it is known.

    The explanation names the first operator of unknown layout on the way to the value.
    """
    if name in layouts:
        return ""
    node = graph.nodes[graph.positions[name]]
    while unknown_nodes := _unknown_inputs(graph, layouts, node):
        node = unknown_nodes[0]
    return f": no rule says of {node.name}{format_line(node.source)} that it keeps them in order"


def _unknown_inputs(graph: Graph, layouts: Mapping[str, BatchLayout], node: Node) -> list[Node]:
    inputs = [graph.nodes[graph.positions[name]] for name in node.inputs if name not in layouts]
    return [input_node for input_node in inputs if input_node.op != "size"]


def hash_crossing_layouts(partition: Partition, orders: Mapping[str, BatchLayout]) -> str:
    """Return a hash of the layouts of all crossing values, which must be equal on all workers."""
    crossing = [(crossing.value, str(orders[crossing.value])) for crossing in partition.crossings]
    return hashlib.sha256(repr(crossing).encode()).hexdigest()[:16]


def describe_place(node: Node) -> str:
    """Return where a node is in the user's code, as a part of a sentence."""
    phrases = {"": "in the model", "loss": "in the loss"}
    return f"{phrases.get(node.module, f'in {node.module}')}{format_line(node.source)}"


def describe_divided_buffer(name: str, writer: Node) -> str:
    """Explain that replicas would disagree on a buffer, as a sentence without its end."""
    return (
        f"the buffer {name} depends on how the samples are divided: {writer.name} writes it"
        f"{format_line(writer.source)}, and replicas would disagree"
    )
