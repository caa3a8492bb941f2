"""Random operators on the way of a gradient, rewritten so that what they draw is a value, drawn once.

The gradient needs the numbers that the operator itself has drawn. Dropout becomes a product with the dropout of ones;
attention with dropout is written out first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.capture.gradients.formulas import name_arguments
from polylane.graph.capture.gradients.products import insert_traced

# They multiply by random noise, whatever they are given.
_NOISE = ("aten.dropout.default", "aten.feature_dropout.default")
_ATTENTION = "aten.scaled_dot_product_attention.default"


def separate_noise(graph: fx.Graph, constants: dict[str, Tensor], nodes: Sequence[fx.Node]) -> bool:
    """Rewrite the random operators among nodes that are differentiated; return whether there was any.

    Args:
        graph: captured code, changed in place.
        constants: tensors that the code closes over, by placeholder name.
        nodes: the operators on the way from a gradient's inputs to its outputs.
    """
    random = [node for node in nodes if _drops(node) and not _is_of_ones(node)]
    for node in random:
        if str(node.target) == _ATTENTION:
            _write_out(graph, constants, node)
        else:
            _multiply_by_noise(graph, node)
    return bool(random)


def _drops(node: fx.Node) -> bool:
    if str(node.target) == _ATTENTION:
        return bool(name_arguments(node)["dropout_p"])
    return str(node.target) in _NOISE and bool(node.args[1] and node.args[2])


def _is_of_ones(node: fx.Node) -> bool:
    value: Any = node.args[0]
    return str(node.target) != _ATTENTION and str(value.target) == "aten.ones_like.default"


def _multiply_by_noise(graph: fx.Graph, node: fx.Node) -> None:
    value: Any = node.args[0]
    with graph.inserting_before(node):
        ones = graph.call_function(torch.ops.aten.ones_like.default, (value,))
    with graph.inserting_after(node):
        product = graph.call_function(torch.ops.aten.mul.Tensor, (value, node))
    ones.meta, product.meta = {**node.meta, "val": value.meta["val"]}, {**node.meta}
    node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    node.update_arg(0, ones)


def _write_out(graph: fx.Graph, constants: dict[str, Tensor], node: fx.Node) -> None:
    """Replace attention by products, a softmax and a dropout."""

    def run(*values: Any) -> list[Any]:
        table = dict(zip(node.all_input_nodes, values, strict=True))
        return [_attend(**fx.map_arg(name_arguments(node), table.__getitem__))]

    (written,) = insert_traced(graph, constants, run, node)
    node.replace_all_uses_with(written)
    graph.erase_node(node)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Compute attention as torch's math backend does: [..., queries, features], [..., keys, features] twice."""
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value))
    root = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf) if masked else scores + attn_mask
    return torch.matmul(torch.dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True), value)
