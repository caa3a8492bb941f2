"""Vector-Jacobian products in operators that keep dimensions apart, where autograd's own would merge or hide them.

Autograd runs a linear layer on a sequence as a product of matrices, for which it merges samples and positions; and a
convolution's backward pass is one operator for the gradients of input and weight. The formulas here compute the same
by operators whose rules for samples and for splitting are known: ``matmul``, a transposed convolution, a padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from polylane.graph.flops import size_hint
from polylane.graph.symbolic_sizes import is_dynamic

# Takes the operator's arguments by name, with the operator's names for them, and the gradient of its output; returns
# the gradient of an argument by its name, or None where autograd's own formula is to be taken.
Formula = Callable[[dict[str, Any], Tensor, str], Tensor | None]

# Backward operators that are computed by simple ones instead, for which rules are known.
_DECOMPOSED = (
    "_log_softmax_backward_data", "_softmax_backward_data", "binary_cross_entropy_backward", "diagonal_backward",
    "elu_backward", "embedding_dense_backward", "glu_backward", "hardsigmoid_backward", "hardswish_backward",
    "hardtanh_backward", "huber_loss_backward", "leaky_relu_backward", "log_sigmoid_backward", "mish_backward",
    "mse_loss_backward", "native_group_norm_backward", "native_layer_norm_backward", "nll_loss_backward",
    "nll_loss2d_backward", "select_backward", "slice_backward", "smooth_l1_loss_backward",
    "soft_margin_loss_backward", "softplus_backward", "native_layer_norm", "native_group_norm",
    "native_batch_norm", "native_batch_norm_backward", "nll_loss_forward", "nll_loss2d_forward",
)  # fmt: skip
DECOMPOSED = [getattr(torch.ops.aten, name) for name in _DECOMPOSED]


def find_formula(node: fx.Node, arguments: Sequence[fx.Node]) -> tuple[Formula, list[str]] | None:
    """Return the formula for an operator and the names of the arguments whose gradients are wanted, or None.

    Args:
        node: the operator that is differentiated.
        arguments: the arguments to which gradients are passed on.
    """
    formula = _FORMULAS.get(str(node.target))
    if formula is None or "autocast" in node.meta:
        return None
    named = name_arguments(node)
    names = [[name for name, value in named.items() if value is argument] for argument in arguments]
    if any(len(matches) != 1 for matches in names):  # an argument that is given twice, or in a list
        return None
    return formula, [name for (name,) in names]


def name_arguments(node: fx.Node) -> dict[str, Any]:
    """Return an operator's arguments by its own names for them, with defaults."""
    target: Any = node.target
    arguments = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    return {a.name: a.default_value for a in target._schema.arguments} | arguments | dict(node.kwargs)


def _linear(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    x, weight = args["input"], args["weight"]
    if weight.dim() != 2 or x.dim() < 2:
        return None
    if argument == "input":
        return torch.matmul(cotangent, weight)
    if argument == "bias":
        return cotangent.sum(list(range(x.dim() - 1)))
    return _contract(cotangent, x)


def _contract(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over all dimensions but the last of each of two tensors: [..., m], [..., n] -> [m, n]."""
    if left.dim() == 2:
        return torch.matmul(left.t(), right)
    shared = "abcdefgh"[: left.dim() - 1]
    return torch.einsum(f"{shared}m,{shared}n->mn", left, right)


def _matmul(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    left, right = args["self"], args["other" if "other" in args else "mat2"]
    if left.dim() < 2 or right.dim() < 2:
        return None
    if left.dim() == right.dim() and list(map(str, left.shape[:-2])) == list(map(str, right.shape[:-2])):
        return torch.matmul(cotangent, right.mT) if argument == "self" else torch.matmul(left.mT, cotangent)
    if right.dim() != 2:
        return None
    return torch.matmul(cotangent, right.mT) if argument == "self" else _contract(left, cotangent)


def _convolution(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    x, weight = args["input"], args["weight"]
    spatial = weight.dim() - 2
    if x.dim() != weight.dim() or any(map(is_dynamic, (*x.shape[2:], *cotangent.shape[2:]))):
        return None
    if argument == "bias":
        return cotangent.sum([0, *range(2, x.dim())])
    stride, padding, dilation = ([*args[name]] * spatial for name in ("stride", "padding", "dilation"))
    stride, padding, dilation = stride[:spatial], padding[:spatial], dilation[:spatial]
    if argument == "weight":
        shapes, mask = (stride, padding, dilation, False, [0] * spatial, args["groups"]), [False, True, False]
        weight_gradient: Tensor = torch.ops.aten.convolution_backward(cotangent, x, weight, None, *shapes, mask)[1]
        return weight_gradient
    # Positions of the input that no output reads, at the end.
    remainder = [
        size_hint(x.shape[d + 2])
        - ((size_hint(cotangent.shape[d + 2]) - 1) * stride[d] - 2 * padding[d])
        - (dilation[d] * (weight.shape[d + 2] - 1) + 1)
        for d in range(spatial)
    ]
    transposed: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[spatial - 1]
    input_gradient: Tensor = transposed(cotangent, weight, None, stride, padding, remainder, args["groups"], dilation)
    return input_gradient


def _transposed_convolution(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    x, weight = args["input"], args["weight"]
    if argument != "input" or x.dim() != weight.dim():
        return None
    convolution: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    form = (args["stride"], args["padding"], args["dilation"], args["groups"])
    gradient: Tensor = convolution(cotangent, weight, None, *form)
    return gradient


def _slice(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    x, step = args["self"], args["step"]
    dim, start, end = args["dim"] % x.dim(), args["start"] or 0, args["end"]
    if start == 0 and step == 1 and (end is None or (isinstance(end, int) and end == torch.iinfo(torch.int64).max)):
        return cotangent
    if step != 1 or is_dynamic(x.shape[dim]) or not isinstance(start, int):
        return None
    offset = min(start % x.shape[dim] if start < 0 else start, x.shape[dim])
    return _pad(cotangent, dim, offset, x.shape[dim] - offset - cotangent.shape[dim])


def _select(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    x, index = args["self"], args["index"]
    dim = args["dim"] % x.dim()
    if is_dynamic(x.shape[dim]) or not isinstance(index, int):
        return None
    offset = index % x.shape[dim]
    return _pad(cotangent.unsqueeze(dim), dim, offset, x.shape[dim] - offset - 1)


def _pad(value: Tensor, dim: int, pad_before: int, pad_after: int) -> Tensor:
    """Return a value with zeros before and after it along one dimension."""
    if not pad_before and not pad_after:
        return value
    return torch.constant_pad_nd(value, [0, 0] * (value.dim() - 1 - dim) + [pad_before, pad_after])


def _constant_pad(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    pad = args["pad"]
    if args.get("mode", "constant") != "constant" or any(not isinstance(n, int) or n < 0 for n in pad):
        return None
    for i in range(len(pad) // 2):
        dim = cotangent.dim() - 1 - i
        cotangent = cotangent.narrow(dim, pad[2 * i], args["self"].shape[dim])
    return cotangent


def _log_sigmoid(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor:
    return cotangent * torch.sigmoid(-args["self"])


def _index(args: dict[str, Any], cotangent: Tensor, argument: str) -> Tensor | None:
    # Positions may be None, which torch.index_put does not take.
    gradient: Tensor = torch.ops.aten.index_put(torch.zeros_like(args["self"]), args["indices"], cotangent, True)
    return gradient


_FORMULAS: dict[str, Formula] = {
    "aten.linear.default": _linear,
    **dict.fromkeys(("aten.matmul.default", "aten.mm.default", "aten.bmm.default"), _matmul),
    **dict.fromkeys((f"aten.conv{n}d.default" for n in (1, 2, 3)), _convolution),
    **{
        f"aten.conv_transpose{n}d.{name}": _transposed_convolution
        for n, name in ((1, "default"), (2, "input"), (3, "input"))
    },
    **dict.fromkeys(("aten.pad.default", "aten.constant_pad_nd.default"), _constant_pad),
    "aten.log_sigmoid.default": _log_sigmoid,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.index.Tensor": _index,
}
