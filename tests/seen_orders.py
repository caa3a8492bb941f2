"""The batch orders of a graph's values, seen by computing: an oracle for what is derived from rules.

A batch is computed whole and in two parts, in float64, and what every operator gives is compared. Nothing is assumed;
what cannot be computed is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.batch import sample_count
from polylane.graph.check import resized
from polylane.graph.export import Loss, Whole, at, reason_of
from polylane.graph.graph import Graph, Node
from polylane.graph.orders import Order, Seen
from polylane.graph.rounding import TRIES
from polylane.graph.side_by_side import MOST, Floor, PartFails, equal, mean_of, side_by_side, three_runs
from polylane.samples.derivation import derive

NOISE = 0.1  # added to every parameter in the second look, for values that are not the start's


@dataclass(frozen=True)
class SeenOrders(Seen):
    """What was seen of a graph's values, and what kept the others from being computed ("" for nothing)."""

    why: str = field(default="", kw_only=True)


def proven_orders(graph: Graph) -> dict[str, Order]:
    """The values of a graph that are proven to hold samples in their order, or to be the same for any."""
    return {name: order for name, order in derive(graph).orders.items() if order in (Order.ROWS, Order.ALIKE)}


def seen_orders(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> SeenOrders:
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
        return SeenOrders(why="the model is on the meta device, where nothing is computed")
    own, nearby = (_seen(graph, whole, leaves, noise) for noise in (0.0, NOISE))
    both = own.orders.keys() & nearby.orders.keys()
    return SeenOrders(
        {name: _agreed(own.orders[name], nearby.orders[name]) for name in both}, why=own.why or nearby.why
    )


def _seen(graph: Graph, whole: Whole, leaves: Sequence[Any], noise: float) -> SeenOrders:
    if noise:  # an odd number of samples, an odd number of them in the first part
        leaves = resized(leaves, min(max(sample_count(leaves), 5), MOST) // 4 * 4 + 1)
    runs = three_runs(graph, whole, leaves, again=TRIES)
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
    return SeenOrders(orders, why=why)


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
