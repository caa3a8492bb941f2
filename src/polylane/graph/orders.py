"""How the parts of a batch make up a value: in their order, alike, as a mean or a sum; by node name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph.export import Loss, Whole, at, reason_of
from polylane.graph.graph import Graph, Node
from polylane.graph.partition import Partition
from polylane.graph.rounding import TRIES
from polylane.graph.side_by_side import Floor, PartFails, equal, mean_of, side_by_side, three_runs

NOISE = 0.1  # in every parameter, for values that are not the start's


class Order(StrEnum):
    """How the parts of a batch make up a value of the whole."""

    ROWS = "rows"  # one after another along the dimension of the samples
    ALIKE = "alike"  # the same for any samples
    MEAN = "mean"  # in their mean, weighted by their samples
    SUM = "sum"
    OTHER = "other"


@dataclass(frozen=True)
class Seen:
    """What is known of a graph's values.

    Attributes:
        orders: by node name; nothing is known of those that are missing.
        why: why not: what kept them from being computed.
    """

    orders: Mapping[str, Order] = field(default_factory=dict)
    why: str = "nobody looked"


def seen_orders(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> Seen:
    """How the parts of a batch make up every value, as far as they can be computed.

    Seen with the model's values, and again with others nearby and the batch divided elsewhere: at the start a value may
    be zero, which is a sum as well as a mean, and pairs of samples make up parts that have an even number of them.

    Args:
        graph: captured from ``model`` and ``loss``.
        model: with its values; unchanged by this.
        loss: the user's.
        leaves: an example batch, flat.
    """
    whole = Whole(model, loss, lambda flat: flat)
    if any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers())):
        return Seen(why="the model is on the meta device, where nothing is computed")
    own, nearby = (_seen(graph, whole, leaves, noise) for noise in (0.0, NOISE))
    both = own.orders.keys() & nearby.orders.keys()
    return Seen({name: _agreed(own.orders[name], nearby.orders[name]) for name in both}, own.why or nearby.why)


def _seen(graph: Graph, whole: Whole, leaves: Sequence[Any], noise: float) -> Seen:
    runs = three_runs(graph, whole, leaves, odd=noise > 0, again=TRIES)
    for run in (*runs, *runs[0].again) if noise else ():
        random = torch.Generator().manual_seed(0)
        for value in (*run.table["parameter"].values(), *run.table["buffer"].values()):
            if value.is_floating_point():
                value.add_(noise * torch.randn(value.shape, generator=random).to(value))
    sizes = [run.part.samples for run in runs[1:]]
    looked, orders, why = 0, dict[str, Order](), ""

    def look(node: Node, value: Any, parts: list[Any], reach: Floor) -> None:
        nonlocal looked, why
        looked += 1
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            why = why or f"{node.name}{at(node.source)} gives what is not a number"
        elif isinstance(value, Tensor):
            orders[node.name] = _order(node, value, parts, sizes, reach)

    try:
        side_by_side(graph, runs, look)
    except Exception as error:
        # Whoever prepares a training has been told, or warned; what comes after this node is not known.
        node = graph.nodes[looked]
        where = "of a part of the batch " if isinstance(error, PartFails) else ""
        cause = error.__cause__ if isinstance(error, PartFails) and error.__cause__ else error
        why = f"{node.name}{at(node.source)} cannot be computed {where}in float64 ({reason_of(cause)})"
    return Seen(orders, why)


def _agreed(own: Order, nearby: Order) -> Order:
    """What a value is that was seen twice."""
    return own if own is nearby else nearby if own is Order.ALIKE else Order.OTHER


def _order(node: Node, value: Tensor, parts: list[Tensor], sizes: list[int], reach: Floor) -> Order:
    dim = node.batch_dim
    if dim is not None:
        return Order.ROWS if _in_rows(value, parts, dim, sizes, reach) else Order.OTHER
    if any(part.shape != value.shape for part in parts):
        return Order.OTHER
    if all(equal(value, part, reach) for part in parts):
        return Order.ALIKE
    if not (value.is_floating_point() or value.is_complex()):
        return Order.OTHER
    if equal(value, mean_of(parts, sizes), reach):
        return Order.MEAN
    return Order.SUM if equal(value, sum(parts), reach) else Order.OTHER


def _in_rows(value: Tensor, parts: list[Tensor], dim: int, sizes: list[int], reach: Floor) -> bool:
    """Whether parts follow each other, each sample with as many rows as every other one."""
    rest = {tuple(n for d, n in enumerate(t.shape) if d != dim) for t in (value, *parts)}
    rows, left = divmod(value.shape[dim], sum(sizes))
    alike = not left and all(part.shape[dim] == rows * n for part, n in zip(parts, sizes, strict=True))
    return len(rest) == 1 and alike and equal(value, torch.cat(parts, dim), reach)


def orders_of(graph: Graph, seen: Seen) -> dict[str, Order]:
    """How the parts of a batch make up every value of a graph, by node name.

    What is the same for parts of one batch counts as their mean if it depends on them: it may be so by chance (a zero
    at the start), and a mean of what is alike is the same again. What nobody knows is in no order.
    """
    code, moving, result = graph.code.fx, set[fx.Node](), dict[str, Order]()
    names = {node.id: node.name for node in graph.nodes}
    for node in code.nodes:
        is_input = node.op == "placeholder" and node.meta["role"][0] == "input"
        if is_input or any(used in moving for used in node.all_input_nodes):
            moving.add(node)
        if node.op != "call_function":
            continue
        val = node.meta.get("val")
        continuous = isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())
        order = seen.orders.get(names[node.name], Order.OTHER)
        chance = order is Order.ALIKE and node in moving and continuous
        result[names[node.name]] = Order.MEAN if chance else order
    return result


def why_unknown(graph: Graph, seen: Seen, name: str) -> str:
    """Why a value's order is not known, as the end of a sentence; "" where it is known to be none of those there are.

    It names the operator at which what is not known begins.
    """
    if name in seen.orders:
        return ""
    node = graph.nodes[graph.positions[name]]
    while before := _unknown_before(graph, seen, node):
        node = before[0]
    line = at(node.source)
    looked = f"it could not be seen, for {seen.why}, and " if seen.why else ""
    return f": {looked}no rule says of {node.name}{line} that it keeps them in order"


def _unknown_before(graph: Graph, seen: Seen, node: Node) -> list[Node]:
    before = [graph.nodes[graph.positions[name]] for name in node.inputs if name not in seen.orders]
    return [other for other in before if other.op != "size"]


def digest(partition: Partition, orders: Mapping[str, Order]) -> str:
    """A number of how the values that cross are divided: workers that looked apart must have seen alike."""
    crossing = [(crossing.value, str(orders[crossing.value])) for crossing in partition.crossings]
    return hashlib.sha256(repr(crossing).encode()).hexdigest()[:16]
