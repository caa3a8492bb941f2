"""Operation counts: floating-point operations and bytes of an operator, from the shapes of its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx


def size_hint(size: Any) -> int:
    """Return a size as a number: a symbol has the example's value; a size that depends on data counts as 1."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.hint is not None else 1


def shape_of(val: Any) -> tuple[int, ...]:
    """Return the example's shape of a tensor value; () for anything else."""
    return tuple(size_hint(size) for size in val.shape) if isinstance(val, Tensor) else ()


def tensors_of(val: Any) -> list[Tensor]:
    """Return the tensors of a node's value, which may be one or several."""
    if isinstance(val, Tensor):
        return [val]
    return [v for v in val if isinstance(v, Tensor)] if isinstance(val, (list, tuple)) else []


def bytes_of(val: Any) -> int:
    """Return the size of a node's value in bytes."""
    return sum(math.prod(shape_of(t)) * t.element_size() for t in tensors_of(val))


def flops_of(node: fx.Node, op: str) -> int:
    """Return the operations of a node's forward pass on the example batch; a multiply-add counts as two."""
    # An operator without a rule of its own counts one operation per output element.
    out = math.prod(shape_of(v)) if isinstance(v := node.meta.get("val"), Tensor) else bytes_of(v) // 4
    inputs = [shape_of(n.meta.get("val")) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    base = op.split(".")[1] if op.startswith("aten.") else op
    if base in _SHAPE_ONLY:
        return 0
    rule = _RULES.get(base)
    return rule(node, inputs, out) if rule is not None and inputs else out


def _matmul(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    # The contraction is the last dimension of the left factor; addmm and baddbmm have the added tensor first.
    shape = inputs[1] if str(node.target).startswith(("aten.addmm", "aten.baddbmm")) and len(inputs) > 1 else inputs[0]
    return 2 * out * (shape[-1] if shape else 1)


def _convolution(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    weight = inputs[1]
    return 2 * out * math.prod(weight[1:])


def _transposed(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _attention(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    query, key, value = inputs[0], inputs[1 if len(inputs) > 1 else 0], inputs[2 if len(inputs) > 2 else -1]
    scores = math.prod(query[:-1]) * key[-2]
    # Q K^T and P V, and about five operations per score for softmax.
    return 2 * scores * (query[-1] + value[-1]) + 5 * scores


def _recurrent(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    rows = math.prod(inputs[0][:-1])
    return sum(2 * rows * math.prod(shape) for shape in inputs[1:] if len(shape) == 2)


def _normalisation(node: fx.Node, inputs: Sequence[tuple[int, ...]], out: int) -> int:
    return 8 * out


_SHAPE_ONLY = frozenset(
    (
        *("view", "reshape", "permute", "transpose", "t", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"),
        *("expand", "expand_as", "view_as", "split", "chunk", "unbind", "slice", "select", "narrow", "getitem", "size"),
        *("detach", "contiguous", "alias", "to", "arange", "zeros", "ones", "full", "empty"),
    )
)
_RULES: dict[str, Any] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    **dict.fromkeys(("scaled_dot_product_attention", "attention"), _attention),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(
        ("layer_norm", "batch_norm", "group_norm", "rms_norm", "softmax", "cross_entropy_loss", "gelu"), _normalisation
    ),
}

DTYPE_NAMES = {kind: str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
