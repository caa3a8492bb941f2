"""Matmul-like operators: demand of linear layers, products, convolutions, attention and recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from polylane.cost.operators.demand import LocalCall, Operation, PassDemand, Product, Shape
from polylane.graph.operators.tiled_attention import are_many_scores


def _product(
    local: LocalCall, product: Product, left: bool, right: bool, bias: bool = False, *, weight: float = 0.0
) -> Operation:
    """Return the demand of a product, with one more for the gradient of each factor that has one.

    Args:
        local: the call with its local shapes.
        product: the forward product (m, k) x (k, n).
        left, right: whether the first and the second factor have gradients.
        bias: whether a bias has a gradient, a sum over rows.
        weight: elements of the second factor if it is a parameter, whose gradient is added to earlier microbatches';
            else 0.
    """
    m, n, k = product.m, product.n, product.k
    back = [replace(product, n=k, k=n)] if left else []
    back += [replace(product, m=n, n=k, k=m)] if right else []
    # Accumulating a weight gradient reads two and writes one tensor of its size.
    moved = 3 * (weight * local.first_itemsize) * right + local.bytes_written * bias
    kernels = len(back) + bool(weight * right) + bias
    return local.operation("matmul", PassDemand((product,), kernels=1), PassDemand(tuple(back), moved, kernels=kernels))


def linear(local: LocalCall) -> Operation | None:
    x, weight = local.shape("input"), local.shape("weight")
    if not x or weight is None or len(weight) != 2 or not local.outputs[0]:
        return None
    n, k = weight
    product = Product(math.prod(x[:-1]), n, k, row_elements=min(n, k))
    return _product(local, product, *map(local.has_gradient, ("input", "weight", "bias")), weight=n * k)


def matmul(left: str, right: str, bias: str = "") -> Callable[[LocalCall], Operation | None]:
    def rule(local: LocalCall) -> Operation | None:
        a, b, out = local.shape(left), local.shape(right), local.outputs[0]
        if not a or not b:
            return None
        k = a[-1]
        if len(b) == 1:
            product = Product(math.prod(a[:-1]), 1, k, row_elements=k)
        elif len(b) == 2:
            product = Product(math.prod(a[:-1]), b[-1], k, row_elements=min(b[-1], k))
        else:
            m = a[-2] if len(a) > 1 else 1
            product = Product(m, b[-1], k, batch=math.prod(out) / max(m * b[-1], 1), row_elements=min(b[-1], k))
        return _product(local, product, *map(local.has_gradient, (left, right, bias)))

    return rule


def einsum(local: LocalCall) -> Operation | None:
    """Return the demand of a two-operand einsum; None for other equations.

    Dimension labels in both operands and the result make the batch, labels in one operand and the result rows or
    columns, labels in both operands only the contracted dimension.
    """
    equation, shapes = local.call.arguments.get("equation"), local.inputs
    if not isinstance(equation, str) or len(shapes) != 2 or "->" not in equation or "." in equation:
        return None
    operands, out = equation.replace(" ", "").split("->")
    left, right = operands.split(",")
    sizes = dict(zip(left + right, (*shapes[0], *shapes[1]), strict=True))

    def size(letters: set[str]) -> int:
        return math.prod(sizes[letter] for letter in letters)

    a, b, c = set(left), set(right), set(out)
    n, k = size((b & c) - a), size((a & b) - c)
    product = Product(size((a & c) - b), n, k, batch=size(a & b & c), row_elements=min(n, k))
    return _product(local, product, *(v.gradient for v in local.call.inputs))


def contraction(local: LocalCall) -> Operation | None:
    """Return the demand of a contraction without batch; k follows from the sizes: (m k)(k n) / (m n) = k²."""
    sizes = [math.prod(shape) for shape in (*local.inputs[:2], local.outputs[0])]
    if len(sizes) < 3 or not all(sizes):
        return None
    k = math.sqrt(sizes[0] * sizes[1] / sizes[2])
    return _product(local, Product(sizes[0] / k, sizes[1] / k, k), *(v.gradient for v in local.call.inputs[:2]))


def bilinear(local: LocalCall) -> Operation | None:
    x, weight = local.shape("input1"), local.shape("weight")
    if not x or weight is None or len(weight) != 3:
        return None
    product = Product(math.prod(x[:-1]), weight[0], weight[1] * weight[2], row_elements=min(weight))
    return _product(local, product, *map(local.has_gradient, ("input1", "weight", "bias")), weight=math.prod(weight))


def convolution(local: LocalCall) -> Operation | None:
    x, weight = local.shape("input"), local.shape("weight")
    if not x or not weight or len(weight) < 3:
        return None
    out = local.outputs[0]
    space = len(weight) - 2
    transposed = "transpose" in local.call.base or bool(local.call.arguments.get("transposed"))
    groups = max(int(local.call.arguments.get("groups", 1)), 1)
    if transposed:  # the backward pass of a convolution from out to x
        x, out = out, x
    # Implicit GEMM: a row for every output pixel of every image, a column for every filter, a term for every
    # weight of a filter; groups are a batch.
    pixels = math.prod(out) // max(out[-space - 1], 1)
    n, k = weight[0] / groups, math.prod(weight[1:])
    forward = Product(pixels, n, k, batch=groups, row_elements=min(weight[0], weight[1]))
    inner = max(math.prod(x) // max(x[-space - 1], 1), 1)  # rows of the input gradient's product
    # The input gradient takes as many operations as the forward pass, by k; strides change m.
    data = replace(forward, m=inner, n=weight[1], k=forward.flops / (2.0 * groups * inner * max(weight[1], 1)))
    weights = replace(forward, m=n, n=k, k=pixels)
    forward_product, second = (data, forward) if transposed else (forward, data)
    has_data, has_weights, has_bias = map(local.has_gradient, ("input", "weight", "bias"))
    back = tuple(p for p, has_gradient in ((second, has_data), (weights, has_weights)) if has_gradient)
    moved = 3 * math.prod(weight) * local.first_itemsize * has_weights + local.bytes_written * has_bias
    backward = PassDemand(back, moved, kernels=len(back) + has_weights + has_bias)
    return local.operation("convolution", PassDemand((forward_product,), kernels=1), backward)


# Reads and writes of the scores in attention with dropout, forward and backward: product, mask, softmax, dropout,
# product. In tiles the backward pass begins with the first four of them again.
OVER_SCORES = (8, 11)
OVER_TILES = (8, 18)


def attention(local: LocalCall) -> Operation | None:
    query, key, value = (local.shape(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None or len(query) < 2:
        return None
    if local.call.arguments.get("dropout_p"):
        return _attention_with_scores(local, query, key, value)
    causal = 0.5 if local.call.arguments.get("is_causal") else 1.0
    flops = 2.0 * causal * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    forward = PassDemand(bytes=local.bytes_read + local.bytes_written, flops=flops, kernels=1)
    # Backward: recomputed scores, and a product for each gradient of scores, queries, keys and values: 5 products to
    # the forward pass's 2.
    moved = local.bytes_read + 2 * local.bytes_written + local.input_gradient_bytes
    backward = PassDemand(bytes=moved, flops=2.5 * flops, kernels=2)
    return local.operation("attention", forward, backward, key[-2])


def _attention_with_scores(local: LocalCall, query: Shape, key: Shape, value: Shape) -> Operation:
    """Return the demand of attention in operators: dropout is drawn by key, which no fused kernel supports."""
    heads, rows, columns = math.prod(query[:-2]), query[-2], key[-2]
    is_causal = bool(local.call.arguments.get("is_causal"))
    in_tiles = are_many_scores((heads, rows, columns), is_causal)
    share = 0.5 if is_causal and in_tiles else 1.0  # tiles leave out keys that come later than all their queries
    scores = share * heads * rows * columns * local.first_itemsize
    score_product = Product(rows * share, columns, query[-1], batch=heads, row_elements=query[-1])
    second = Product(rows * share, value[-1], columns, batch=heads, row_elements=value[-1])
    forward_bytes, back = (times * scores for times in (OVER_TILES if in_tiles else OVER_SCORES))
    forward = PassDemand((score_product, second), local.bytes_read + local.bytes_written + forward_bytes, kernels=5)
    moved = local.bytes_read + 2 * local.bytes_written + local.input_gradient_bytes + back
    back_products = (score_product, score_product, second, second, *[score_product] * in_tiles)
    return local.operation("matmul", forward, PassDemand(back_products, moved, kernels=8 + 3 * in_tiles))


def recurrent(local: LocalCall) -> Operation | None:
    """Return the demand of LSTM, GRU and RNN: one product with the inputs of all steps, one per step with the state.

    The weights of a layer and direction alternate: (gates, inputs), (gates, state).
    """
    x = local.inputs[0]
    weights = [
        shape
        for shape, v in zip(local.inputs[1:], local.call.inputs[1:], strict=True)
        if len(shape) == 2 and v.gradient
    ]
    if len(x) < 2 or not weights:
        return None
    rows = math.prod(x[:-1])
    packed = "batch_sizes" in local.call.arguments
    steps = 1 if packed else x[1 if local.call.arguments.get("batch_first") and len(x) > 2 else 0]
    products = []
    for index, (gates, terms) in enumerate(weights):
        state = index % 2 == 1
        times = max(steps, 1) if state else 1
        products.append(Product(rows / times, gates, terms, repeats=times, row_elements=min(gates, terms)))
    size = sum(math.prod(shape) for shape in weights) * local.first_itemsize
    moved = 4 * sum(rows * gates for gates, _ in weights) * local.first_itemsize
    kernels = len(weights) * 2.0 + 2.0 * sum(p.repeats for p in products if p.repeats > 1)
    forward = PassDemand(tuple(products), moved, kernels=kernels)
    back = tuple(
        product
        for p in products
        for product in (replace(p, n=p.k, k=p.n), replace(p, m=p.n, n=p.k, k=p.m * p.repeats, repeats=1))
    )
    return local.operation("recurrent", forward, PassDemand(back, 2 * moved + 3 * size, kernels=2 * kernels))
