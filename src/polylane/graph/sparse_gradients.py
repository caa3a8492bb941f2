"""Sparse gradients: tables of embeddings whose gradients have only the rows that were looked up (``sparse=True``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.flops import shape_of
from polylane.graph.graph import Graph, once_per_graph

_LOOKUPS = ("embedding", "embedding_bag", "_embedding_bag")


@once_per_graph
def find_sparse_gradients(graph: Graph) -> dict[str, int]:
    """Find the parameters whose gradients are sparse tensors: tables that are read by sparse look-ups alone.

    A table that is also read otherwise (tied to an output layer) has the sum of a sparse and a dense gradient, which
    is dense.

    Args:
        graph: the captured graph of a model and its loss.

    Returns:
        Name -> number of indices that are looked up, at ``Graph.samples`` samples: so many rows a gradient has at most.
    """
    row_counts: dict[str, int] = {}
    for node in graph.code.fx.nodes:
        if node.op != "placeholder" or node.meta["role"][0] != "parameter":
            continue
        name = node.meta["role"][1]
        looked_up = [_count_sparse_rows(user, node) for user in node.users]
        if looked_up and graph.parameters[name].trainable and None not in looked_up:
            row_counts[name] = sum(rows for rows in looked_up if rows is not None)
    return row_counts


def count_exchanged_rows(graph: Graph, name: str, samples: float) -> int:
    """Return how many rows the sparse gradient of a table has at most, of so many samples."""
    looked_up = math.ceil(find_sparse_gradients(graph)[name] * samples / graph.samples)
    return min(looked_up, graph.parameters[name].shape[0])


def sparse_gradient_bytes(rows: int, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of so many rows of a sparse gradient: an index of 8 bytes each, and its values.

    Args:
        rows: number of rows that have been touched.
        shape: shape of the whole table.
        itemsize: bytes of one element.
    """
    return rows * (8 + math.prod(shape[1:]) * itemsize)


def gradient_sizes(graph: Graph, samples: float, names: Collection[str]) -> dict[str, int]:
    """Return the bytes of the sparse gradients of some parameters, of so many samples: at most the parameter's."""
    sizes = dict[str, int]()
    for name in find_sparse_gradients(graph).keys() & set(names):
        info = graph.parameters[name]
        itemsize = info.bytes // max(1, math.prod(info.shape))
        rows = count_exchanged_rows(graph, name, samples)
        sizes[name] = min(info.bytes, sparse_gradient_bytes(rows, info.shape, itemsize))
    return sizes


def _count_sparse_rows(call: fx.Node, table: fx.Node) -> int | None:
    """Return how many indices a call looks up sparsely in a table; None for any other operator."""
    if getattr(getattr(call.target, "overloadpacket", None), "__name__", "") not in _LOOKUPS:
        return None
    arguments = _named_arguments(call)
    if arguments["weight"] is not table or not arguments["sparse"]:
        return None
    return math.prod(shape_of(arguments["indices"].meta["val"]))


def _named_arguments(call: fx.Node) -> Mapping[str, Any]:
    schema: Any = call.target._schema  # type: ignore[union-attr]
    arguments = dict(zip((a.name for a in schema.arguments), call.args, strict=False))
    return {**{a.name: a.default_value for a in schema.arguments if a.has_default_value()}, **arguments, **call.kwargs}


def densify(gradient: Tensor) -> Tensor:
    """Return a gradient as an ordinary tensor; itself if it is one."""
    return gradient.to_dense() if gradient.layout is torch.sparse_coo else gradient
