"""Sharding rules of matrix products and other multilinear operators: by batch, rows, columns, or the contraction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase

from polylane.placement.kernels.empty_shards import covers_all_ranks
from polylane.placement.placement import PARTIAL
from polylane.placement.rules.by_dimension import DimLabels, broadcast_labels, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy, TensorValue

# Labels other than m, n and k: those of batch dimensions.
_BATCH = "".join(letter for letter in ascii_lowercase if letter not in "kmn")

NAMES = {"m": "rows of the left", "n": "columns", "k": "rows"}


def multilinear(
    call: OperatorCall,
    factors: Mapping[int, DimLabels],
    output: Sequence[str],
    *,
    added: TensorValue | None = None,
    names: Mapping[str, str] = NAMES,
    skip: str = "",
    whole: Sequence[TensorValue] = (),
) -> Iterator[Strategy]:
    """Yield the strategies of a sum of products: shard any label, or let one factor be a partial sum.

    Args:
        call: the operator with concrete shapes.
        factors: by index among the inputs, a label for every dimension.
        output: labels of the output. Labels that only factors have are summed over: the output is then partial.
        added: tensor that is added to the products, broadcast to the output.
        names: the strategies' names by label, as in :func:`strategies_by_dimension`.
        skip: labels that are not to be sharded.
        whole: factors that are never partial sums (weights).
    """
    # A dimension of size 1 broadcasts against a longer one with the same label: it must stay whole.
    sizes: dict[str, int] = {}
    for i, dim_labels in factors.items():
        for size, letter in zip(call.inputs[i].shape, dim_labels, strict=True):
            if letter is not None:
                sizes[letter] = max(sizes.get(letter, size), size) if size != 1 else sizes.get(letter, 1)
    inputs: list[DimLabels] = [[]] * len(call.inputs)
    for i, dim_labels in factors.items():
        shape = call.inputs[i].shape
        inputs[i] = [None if n != sizes.get(c or "") else c for n, c in zip(shape, dim_labels, strict=True)]
    if added is not None:
        inputs[added.index] = broadcast_labels(added, output)
    addends = [] if added is None else [added.index]
    summed = "".join(letter for letter in sizes if letter not in output)
    yield from strategies_by_dimension(call, inputs, [output], names=names, summed=summed, added=addends, skip=skip)
    # Linear in each factor: with one factor a partial sum, the others whole, the output is a partial sum.
    for i in factors:
        value = call.inputs[i]
        if value not in whole and (value.dtype.is_floating_point or value.dtype.is_complex):
            yield call.strategy("summands", dict.fromkeys((i, *addends), PARTIAL), PARTIAL)


@rule("linear")
def linear(call: OperatorCall) -> Iterator[Strategy]:
    """x (..., k) W (n, k) + b (n) (Shoeybi et al., Megatron-LM, section 3: columns, then rows)."""
    x, weight = call["input"], call["weight"]
    rows = list(_BATCH[: x.dim - 1])
    columns = ["n"] if weight.dim == 2 else []
    factors = {x.index: [*rows, "k"], weight.index: [*columns, "k"]}
    yield from multilinear(call, factors, [*rows, *columns], added=call["bias"], whole=[weight])


@rule("matmul", "linalg_matmul", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm")
def matmul(call: OperatorCall) -> Iterator[Strategy]:
    """(..., m, k) (..., k, n), batches broadcast; one-dimensional operands are (k).

    addmm and its like give beta * self + alpha * the product, with ``self`` broadcast.
    """
    *added, left, right = call.inputs
    batch_dims = max(left.dim, right.dim, 2) - 2
    batch = list(_BATCH[:batch_dims])
    m, n = ["m"] if left.dim > 1 else [], ["n"] if right.dim > 1 else []
    factors: dict[int, DimLabels] = {
        left.index: [*batch[batch_dims - max(left.dim - 2, 0) :], *m, "k"],
        right.index: [*batch[batch_dims - max(right.dim - 2, 0) :], "k", *n],
    }
    strategies = multilinear(call, factors, [*batch, *m, *n], added=added[0] if added else None)
    # torch's addmv does not broadcast a single number to an output without rows.
    refuses = call.base == "addmv" and added[0].shape != call.outputs[0].shape
    yield from filter(covers_all_ranks, strategies) if refuses else strategies


@rule("addbmm")
def addbmm(call: OperatorCall) -> Iterator[Strategy]:
    """beta * self + alpha * the sum over the batch of (batch, m, k) (batch, k, n)."""
    bias, left, right = call.inputs
    names = {**NAMES, "b": "batch"}
    factors = {left.index: ["b", "m", "k"], right.index: ["b", "k", "n"]}
    yield from multilinear(call, factors, ["m", "n"], added=bias, names=names)


@rule("outer", "ger", "addr")
def outer(call: OperatorCall) -> Iterator[Strategy]:
    """(m) (n) -> (m, n); addr gives beta * self + alpha * that product."""
    *added, left, right = call.inputs
    factors = {left.index: ["m"], right.index: ["n"]}
    yield from multilinear(call, factors, ["m", "n"], added=added[0] if added else None)


@rule("inner")
def inner(call: OperatorCall) -> Iterator[Strategy]:
    """(..., k) (---, k) -> (..., ---); a number scales the other operand."""
    left, right = call.inputs
    rows = ascii_lowercase[: max(left.dim - 1, 0)]
    columns = ascii_lowercase[: max(right.dim - 1, 0)].upper()
    if not left.dim or not right.dim:
        dim_labels = ascii_lowercase[: max(left.dim, right.dim)]
        yield from multilinear(call, {i: list(dim_labels[: call.inputs[i].dim]) for i in (0, 1)}, dim_labels)
        return
    yield from multilinear(call, {0: [*rows, "k"], 1: [*columns, "k"]}, [*rows, *columns])


@rule("tensordot")
def tensordot(call: OperatorCall) -> Iterator[Strategy]:
    """Pairs of dimensions are summed over; the others follow each other in the output."""
    left, right = call["self"], call["other"]
    left_labels, right_labels = list(ascii_lowercase[: left.dim]), list(ascii_lowercase[: right.dim].upper())
    pairs = [(a % left.dim, b % right.dim) for a, b in zip(call["dims_self"], call["dims_other"], strict=True)]
    for a, b in pairs:
        right_labels[b] = left_labels[a]
    output = [c for d, c in enumerate(left_labels) if d not in {a for a, _ in pairs}]
    output += [c for d, c in enumerate(right_labels) if d not in {b for _, b in pairs}]
    yield from multilinear(call, {left.index: left_labels, right.index: right_labels}, output)


@rule("linalg_vecdot")
def vecdot(call: OperatorCall) -> Iterator[Strategy]:
    """Dot products of vectors along one dimension, everything else broadcast."""
    dims = max(value.dim for value in call.inputs)
    # ``dim`` counts in the broadcast shape: labels of a shorter operand are the last ones.
    dim_labels = list(_BATCH[:dims])
    dim_labels[call["dim"] % dims] = "k"
    factors = {value.index: dim_labels[dims - value.dim :] for value in call.inputs}
    yield from multilinear(call, factors, [letter for letter in dim_labels if letter != "k"])


@rule("linalg_multi_dot", "chain_matmul")
def chain(call: OperatorCall) -> Iterator[Strategy]:
    """A product of matrices; the first may be a row and the last a column."""
    dim_labels = [list(ascii_lowercase[i : i + 2]) for i in range(len(call.inputs))]
    if call.inputs[0].dim == 1:
        dim_labels[0] = dim_labels[0][1:]
    if call.inputs[-1].dim == 1:
        dim_labels[-1] = dim_labels[-1][:1]
    output = [*dim_labels[0][:-1], *dim_labels[-1][1:]] if len(dim_labels) > 1 else dim_labels[0]
    yield from multilinear(call, dict(enumerate(dim_labels)), output)


@rule("bilinear")
def bilinear(call: OperatorCall) -> Iterator[Strategy]:
    """x (..., i), y (..., j), W (n, i, j), b (n) -> (..., n)."""
    x, y, weight = call["input1"], call["input2"], call["weight"]
    rows = [c for c in ascii_lowercase if c not in "ijn"][: x.dim - 1]
    factors: dict[int, DimLabels] = {
        x.index: [*rows, "i"],
        y.index: [*rows, "j"],
        weight.index: ["n", "i", "j"],
    }
    names = {**NAMES, "i": "features of the left", "j": "features of the right"}
    strategies = multilinear(call, factors, [*rows, "n"], added=call["bias"], names=names, whole=[weight])
    yield from filter(covers_all_ranks, strategies)  # torch refuses to sum over no features


@rule("einsum")
def einsum(call: OperatorCall) -> Iterator[Strategy]:
    """Any equation; a label that one operand has twice (a diagonal) is not sharded."""
    inputs, output = parse_equation(call["equation"], [value.dim for value in call.inputs])
    twice = "".join({c for dim_labels in inputs for c, times in Counter(dim_labels).items() if times > 1})
    names = {c: f"dim {c}" for dim_labels in inputs for c in dim_labels}
    yield from multilinear(call, dict(enumerate(inputs)), output, names=names, skip=twice)


def parse_equation(equation: str, dims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Parse an einsum equation into labels for the dimensions of every operand, and of the output.

    The dimensions of an ellipsis get the labels "0", "1", ..., numbered from the last one.

    Args:
        equation: in torch's form; without "->" the output has the labels that occur once, in alphabetical order.
        dims: number of dimensions of every operand.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = [part.replace("...", ".") for part in left.split(",")]
    widths = [n - len(part) + 1 if "." in part else 0 for part, n in zip(parts, dims, strict=True)]
    if not arrow:
        counts = Counter(c for part in parts for c in part if c != ".")
        right = "." + "".join(sorted(c for c, times in counts.items() if times == 1))
    expanded = [_expand_ellipsis(part, width) for part, width in zip(parts, widths, strict=True)]
    return expanded, _expand_ellipsis(right.replace("...", "."), max(widths, default=0))


def _expand_ellipsis(part: str, width: int) -> list[str]:
    labels = [str(i) for i in reversed(range(width))]
    at = part.find(".")
    return list(part) if at < 0 else [*part[:at], *labels, *part[at + 1 :]]


_CDIST_ROWS = 25  # with more rows of either operand torch takes the Euclidean distance from a matrix product


@rule("cdist")
def cdist(call: OperatorCall) -> Iterator[Strategy]:
    """Distances of rows: (..., m, k) (..., n, k) -> (..., m, n), batches broadcast."""
    left, right = call["x1"], call["x2"]
    batch_dims = max(left.dim, right.dim) - 2
    batch = list(_BATCH[:batch_dims])
    dim_labels: list[DimLabels] = [
        broadcast_labels(left, [*batch, "m", "k"]), broadcast_labels(right, [*batch, "n", "k"]),
    ]  # fmt: skip
    names = {"m": "rows of the left", "n": "rows of the right"}
    sizes = (left.shape[-2], right.shape[-2])
    crosses = call["p"] == 2 and not call["compute_mode"] and max(sizes) > _CDIST_ROWS
    strategies = strategies_by_dimension(
        call, dim_labels, [[*batch, "m", "n"]], names=names, local=_keep_product if crosses else None, skip="k"
    )
    yield from strategies


def _keep_product(edit: RankCall) -> None:
    """Have a part of few rows computed as the whole is."""
    edit["compute_mode"] = 1  # always from a matrix product
