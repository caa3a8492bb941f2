"""Weight gradients of operators that are linear in a weight: ATen's formulas, apart from those of their inputs.

For y = f(x, w) + b, linear in x and in w, the gradient of x takes w and that of y; those of w and b take x and that of
y alone. So the gradients of weights can be computed at any later time (Qi et al., Zero Bubble Pipeline Parallelism,
ICLR 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# From the gradient of the result, the kept input and the weight: the gradients of the weight, and of the bias or None.
Gradients = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
# Adds the gradient of the weight, from that of the result and the kept input, to a tensor; returns the bias's or None.
Adds = Callable[[Tensor, Tensor, Tensor], Tensor | None]
# Where an operand is among the positional arguments: its index, or the indices of a list and in it.
Position = tuple[int, ...]


@dataclass(frozen=True)
class WeightFormula:
    """How the gradients of one call's weight and bias follow from its input and the gradient of its result.

    Attributes:
        kept: position of the input that is kept until the weight gradient is computed.
        weight: position of the weight.
        bias: position of the bias whose gradient is computed with the weight's; None without one.
        gradients: computes both gradients; the bias's is None where ``bias`` is.
        is_product: whether the operator is a product that autocast computes in its lower precision.
        add: adds the gradient of a weight of two dimensions, of an input of two or more, to a tensor in one product;
            None: there is no such product.
    """

    kept: Position
    weight: Position
    bias: Position | None
    gradients: Gradients
    is_product: bool = True
    add: Adds | None = None


def operand_at(args: Sequence[Any], position: Position) -> Any:
    """Return the operand at a position of nested positional arguments."""
    value: Any = args
    for index in position:
        value = value[index]
    return value


def find_formula(op: str, args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    """Return the formula of an operator's call; None where its weight gradient is computed with its input's.

    Args:
        op: full name of the operator, "aten.linear.default".
        args: its arguments by the names of torch's schema, in the schema's order.
        is_weight: tells of an argument whether it depends on trained parameters alone.
    """
    library, _, name = op.partition(".")
    rule = _RULES.get(name.partition(".")[0]) if library == "aten" else None
    return None if rule is None else rule(args, is_weight)


def _find_bias(args: Mapping[str, Any], name: str, is_weight: Callable[[Any], bool]) -> Position | None:
    return (list(args).index(name),) if is_weight(args.get(name)) else None


# ---- products --------------------------------------------------------------------------------------------------------


def _linear(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    if is_weight(args["input"]) or not is_weight(args["weight"]):
        return None
    bias = _find_bias(args, "bias", is_weight)

    def gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = grad.reshape(-1, weight.shape[0])
        of_weight = rows.t().mm(x.reshape(-1, weight.shape[-1]).conj())
        return of_weight, None if bias is None else rows.sum(0)

    def add(grad: Tensor, x: Tensor, into: Tensor) -> Tensor | None:
        rows = grad.reshape(-1, into.shape[0])
        torch.addmm(into, rows.t(), x.reshape(-1, into.shape[-1]).conj(), out=into)
        return None if bias is None else rows.sum(0)

    return WeightFormula((0,), (1,), bias, gradients, add=add)


def _product(first: str, second: str, added: str = "") -> Callable[..., WeightFormula | None]:
    """Return the rule of a matrix product with a weight on either side, and perhaps a tensor that is added."""

    def rule(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
        left, right = is_weight(args[first]), is_weight(args[second])
        if left == right:
            return None
        bias, names = _find_bias(args, added, is_weight), list(args)
        beta, alpha = args.get("beta", 1), args.get("alpha", 1)

        def gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
            of_weight = _left_gradient(grad, x, weight) if left else _right_gradient(grad, x, weight)
            of_weight = of_weight if alpha == 1 else of_weight * alpha
            return of_weight, None if bias is None else grad if beta == 1 else grad * beta

        def add(grad: Tensor, x: Tensor, into: Tensor) -> Tensor | None:
            rows = grad.reshape(-1, grad.shape[-1])
            torch.addmm(into, x.reshape(-1, x.shape[-1]).t().conj(), rows, alpha=alpha, out=into)
            return None if bias is None else grad if beta == 1 else grad * beta

        operand, weight = (second, first) if left else (first, second)
        # One product over all rows is the gradient of a matrix on the right.
        once = None if left else add
        return WeightFormula((names.index(operand),), (names.index(weight),), bias, gradients, add=once)

    return rule


def _right_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of w in x @ w, with the dimensions that matmul broadcasts still in it."""
    if weight.dim() == 1:
        grad = grad.unsqueeze(-1)
    if x.dim() == 1:
        x, grad = x.unsqueeze(0), grad.unsqueeze(-2)
    if weight.dim() <= 2:  # one product over the rows of all batch dimensions, as in ATen's own folding
        product = x.reshape(-1, x.shape[-1]).t().conj() @ grad.reshape(-1, grad.shape[-1])
    else:
        product = x.mT.conj() @ grad
    return product.squeeze(-1) if weight.dim() == 1 else product


def _left_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of w in w @ x, with the dimensions that matmul broadcasts still in it."""
    if x.dim() == 1:
        x, grad = x.unsqueeze(-1), grad.unsqueeze(-1)
    if weight.dim() == 1:
        grad = grad.unsqueeze(-2)
    product = torch.einsum("...nm,...km->nk", grad, x.conj()) if weight.dim() <= 2 else grad @ x.mT.conj()
    return product.squeeze(-2) if weight.dim() == 1 else product


def _einsum(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    """Return the formula of a contraction of two operands, of which each index is in two of three terms at least."""
    equation, operands = str(args["equation"]).replace(" ", ""), args["tensors"]
    terms, arrow, result = equation.partition("->")
    factors = terms.split(",")
    if not arrow or "." in equation or len(factors) != 2 or len(operands) != 2:
        return None
    flags = [is_weight(operand) for operand in operands]
    if sum(flags) != 1:
        return None
    at = flags.index(True)
    weight, factor = factors[at], factors[1 - at]
    # A repeated index is a diagonal, and one of the weight alone is summed there: no contraction gives those back.
    if any(len(set(term)) < len(term) for term in (weight, factor, result)) or not set(weight) <= set(factor + result):
        return None

    def gradients(grad: Tensor, x: Tensor, weight_value: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.einsum(f"{result},{factor}->{weight}", grad, x.conj()), None

    return WeightFormula((1, 1 - at), (1, at), None, gradients)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _convolution(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    return _find_convolution(args, is_weight, bool(args.get("transposed", False)))


def _transposed_convolution(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    return _find_convolution(args, is_weight, True)


def _find_convolution(
    args: Mapping[str, Any], is_weight: Callable[[Any], bool], transposed: bool
) -> WeightFormula | None:
    if is_weight(args["input"]) or not is_weight(args["weight"]):
        return None
    bias = _find_bias(args, "bias", is_weight)
    stride, padding, dilation, groups = (args[name] for name in ("stride", "padding", "dilation", "groups"))
    output_padding = args.get("output_padding", 0)

    def gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        space = weight.dim() - 2
        if x.dim() == space + 1:  # one sample without a batch dimension
            x, grad = x.unsqueeze(0), grad.unsqueeze(0)
        x, padded = _pad_input(x, padding, _per_dimension(dilation, space), weight.shape[2:])
        _, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
            grad, x, weight, None if bias is None else [grad.shape[1]],
            _per_dimension(stride, space), padded, _per_dimension(dilation, space),
            transposed, _per_dimension(output_padding, space), groups, [False, True, bias is not None],
        )  # fmt: skip
        return of_weight, None if bias is None else of_bias

    return WeightFormula((0,), (1,), bias, gradients)


def _pad_input(x: Tensor, padding: Any, dilation: Sequence[int], kernel: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the input and the padding of both sides in numbers; "same" may pad each last side by one more."""
    if padding != "same":
        return x, _per_dimension(0 if padding == "valid" else padding, len(kernel))
    total = [spacing * (size - 1) for spacing, size in zip(dilation, kernel, strict=True)]
    if any(amount % 2 for amount in total):
        x = torch.nn.functional.pad(x, [side for amount in reversed(total) for side in (0, amount % 2)])
    return x, [amount // 2 for amount in total]


def _per_dimension(value: Any, space: int) -> list[int]:
    """Return a setting of a convolution for each dimension of space; torch takes one number for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * space if len(values) == 1 else values


# ---- look-ups --------------------------------------------------------------------------------------------------------


def _embedding(args: Mapping[str, Any], is_weight: Callable[[Any], bool]) -> WeightFormula | None:
    if args["sparse"] or not is_weight(args["weight"]):
        return None
    padding, scales = args["padding_idx"], args["scale_grad_by_freq"]

    def gradients(grad: Tensor, indices: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        gradient = torch.ops.aten.embedding_dense_backward.default(grad, indices, weight.shape[0], padding, scales)
        return gradient, None

    return WeightFormula((1,), (0,), None, gradients, is_product=False)


_RULES: dict[str, Callable[[Mapping[str, Any], Callable[[Any], bool]], WeightFormula | None]] = {
    "linear": _linear,
    "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2", "self"),
    "baddbmm": _product("batch1", "batch2", "self"),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "embedding": _embedding,
}
