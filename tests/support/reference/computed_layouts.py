"""The batch orders of a graph's values, seen by computing: an oracle for what is derived from rules.

A batch is computed whole and in two parts, in float64, and what every operator gives is compared. Nothing is assumed;
what cannot be computed is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.batch import sample_count
from polylane.graph.capture.export import Loss, ModelWithLoss
from polylane.graph.capture.self_check import resize_batch
from polylane.graph.graph import Graph, Node
from polylane.graph.nodes.user_lines import format_line, reason_of
from polylane.graph.rounding_noise import TRIES
from polylane.samples.batch_layout import BatchLayout
from polylane.samples.derivation import derive_composition
from polylane.samples.split_runs import MOST, PartFails, equal_within, make_runs, mean_of_parts, run_split

NOISE = 0.1  # added to every parameter in the second look, for values that are not the start's


@dataclass(frozen=True)
class SeenOrders:
    """What was seen of a graph's values, by name, and what kept the others from being computed ("" for nothing)."""

    layouts: Mapping[str, BatchLayout] = field(default_factory=dict)
    unknown_reason: str = field(default="", kw_only=True)


def proven_orders(graph: Graph) -> dict[str, BatchLayout]:
    """The values of a graph that are proven to hold samples in their order, or to be the same for any."""
    return {
        name: order
        for name, order in derive_composition(graph).batch_layouts.items()
        if order in (BatchLayout.SHARDED_BY_SAMPLE, BatchLayout.REPLICATED)
    }


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
    whole = ModelWithLoss(model, loss, lambda flat: flat)
    if any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers())):
        return SeenOrders(unknown_reason="the model is on the meta device, where nothing is computed")
    own, nearby = (_seen(graph, whole, leaves, noise) for noise in (0.0, NOISE))
    both = own.layouts.keys() & nearby.layouts.keys()
    return SeenOrders(
        {name: _agreed(own.layouts[name], nearby.layouts[name]) for name in both},
        unknown_reason=own.unknown_reason or nearby.unknown_reason,
    )


def _seen(graph: Graph, whole: ModelWithLoss, leaves: Sequence[Any], noise: float) -> SeenOrders:
    if noise:  # an odd number of samples, an odd number of them in the first part
        leaves = resize_batch(leaves, min(max(sample_count(leaves), 5), MOST) // 4 * 4 + 1)
    runs = make_runs(graph, whole, leaves, again=TRIES)
    for run in (*runs, *runs[0].nudged_runs) if noise else ():
        random = torch.Generator().manual_seed(0)
        for value in (*run.tensors_by_role["parameter"].values(), *run.tensors_by_role["buffer"].values()):
            if value.is_floating_point():
                value.add_(noise * torch.randn(value.shape, generator=random).to(value))
    sizes = [run.part.samples for run in runs[1:]]
    looked, orders, why = 0, dict[str, BatchLayout](), ""

    def look(node: Node, value: Any, parts: list[Any], floors: list[float]) -> None:
        nonlocal looked, why
        looked += 1
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
            why = why or f"{node.name}{format_line(node.source)} gives what is not a number"
        elif isinstance(value, Tensor):
            orders[node.name] = _order(node, value, parts, sizes, floors[0])

    try:
        run_split(graph, runs, look)
    except Exception as error:
        # Whoever prepares a training has been told, or warned; what comes after this node is not known.
        node = graph.nodes[looked]
        where = "of a part of the batch " if isinstance(error, PartFails) else ""
        cause = error.__cause__ if isinstance(error, PartFails) and error.__cause__ else error
        why = f"{node.name}{format_line(node.source)} cannot be computed {where}in float64 ({reason_of(cause)})"
    return SeenOrders(orders, unknown_reason=why)


def _agreed(own: BatchLayout, nearby: BatchLayout) -> BatchLayout:
    """What a value is that was seen twice."""
    return own if own is nearby else nearby if own is BatchLayout.REPLICATED else BatchLayout.UNKNOWN


def _order(node: Node, value: Tensor, parts: list[Tensor], sizes: list[int], reach: float) -> BatchLayout:
    dim = node.batch_dim
    if dim is not None:
        return BatchLayout.SHARDED_BY_SAMPLE if _in_rows(value, parts, dim, sizes, reach) else BatchLayout.UNKNOWN
    if any(part.shape != value.shape for part in parts):
        return BatchLayout.UNKNOWN
    if all(equal_within(value, part, reach) for part in parts):
        return BatchLayout.REPLICATED
    if not (value.is_floating_point() or value.is_complex()):
        return BatchLayout.UNKNOWN
    if equal_within(value, mean_of_parts(parts, sizes), reach):
        return BatchLayout.MEAN
    return BatchLayout.SUM if equal_within(value, sum(parts), reach) else BatchLayout.UNKNOWN


def _in_rows(value: Tensor, parts: list[Tensor], dim: int, sizes: list[int], reach: float) -> bool:
    """Whether parts follow each other, each sample with as many rows as every other one."""
    rest = {tuple(n for d, n in enumerate(t.shape) if d != dim) for t in (value, *parts)}
    rows, left = divmod(value.shape[dim], sum(sizes))
    alike = not left and all(part.shape[dim] == rows * n for part, n in zip(parts, sizes, strict=True))
    return len(rest) == 1 and alike and equal_within(value, torch.cat(parts, dim), reach)
