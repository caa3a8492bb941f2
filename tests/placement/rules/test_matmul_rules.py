"""Matrix products, split in every way, give what they give whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.placement.placement import PARTIAL, Replicate, Shard
from polylane.placement.rules.matmul import parse_equation
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import OperatorCall, Strategy, TensorValue
from tests.placement.split_checks import check, cut_outputs, even_cuts, join_cuts, uneven
from tests.support import subsets

aten = torch.ops.aten
brief = settings(max_examples=subsets.examples(25), deadline=None)
degrees = st.sampled_from([2, 3])
sizes = st.integers(1, 6)
numbers = st.sampled_from([0.0, 1.0, -0.5, 2.0])


def tensor(*shape: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=dtype).requires_grad_(grad)


def names(found: list[Strategy]) -> set[str]:
    return {s.name for s in found}


def cut_alike(found: list[Strategy]) -> int:
    """How many strategies sum over a dimension that is cut."""
    return sum(s.outputs[0] == PARTIAL and any(isinstance(p, Shard) for p in s.inputs) for s in found)


@brief
@given(st.lists(sizes, max_size=2), sizes, sizes, st.sampled_from([None, "n", "one", "rows"]), degrees)
def test_linear(rows: list[int], k: int, n: int, bias: str | None, degree: int) -> None:
    bias = "n" if bias == "rows" and len(rows) != 1 else bias
    shapes = {"n": [n], "one": [1], "rows": [*rows, n]}
    args = [tensor(*rows, k), tensor(n, k, seed=1), tensor(*shapes[bias], seed=2) if bias else None]
    found = check(aten.linear.default, args, degree=degree)
    assert ("columns" in names(found)) == (n > 1)
    assert ("rows" in names(found)) == (k > 1)
    assert cut_outputs(found) == {d for d, size in enumerate([*rows, n]) if size > 1}
    assert "summands" in names(found)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_fused_and_empty_parts(bias: bool) -> None:
    fused = join_cuts([even_cuts(4, 2), even_cuts(2, 2), even_cuts(3, 2)])
    args = [tensor(2, 3, 6), tensor(9, 6, seed=1), tensor(9, seed=2) if bias else None]
    cuts = {
        ("in", 1, 0): [fused, ((0, 0, 9),), ((0, 9, 9),)],
        ("in", 0, 2): [uneven(6, 2), ((0, 0, 6),), ((0, 1, 2), (2, 5, 6))],
        ("out", 0, 1): [uneven(3, 2, 1)],
    }
    found = check(aten.linear.default, args, cuts=cuts)
    assert any(s.outputs[0] == Shard(2, fused) and s.inputs[1] == Shard(0, fused) for s in found)
    assert sum(s.name == "rows" for s in found) == 4


@st.composite
def operands(draw: Any) -> tuple[list[int], list[int]]:
    """Shapes that torch.matmul multiplies: vectors, matrices, batches that broadcast."""
    m, k, n = draw(sizes), draw(sizes), draw(sizes)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))

    def own() -> list[int]:
        kept = batch[draw(st.integers(0, len(batch))) :]
        return [1 if draw(st.booleans()) else size for size in kept]

    left = [k] if draw(st.integers(0, 4)) == 0 else [*own(), m, k]
    right = [k] if draw(st.integers(0, 4)) == 0 else [*own(), k, n]
    return left, right


@brief
@given(operands(), degrees)
def test_matmul(shapes: tuple[list[int], list[int]], degree: int) -> None:
    left, right = tensor(*shapes[0]), tensor(*shapes[1], seed=1)
    out = torch.matmul(left, right)
    found = check(aten.matmul.default, [left, right], degree=degree)
    assert cut_outputs(found) == {d for d, size in enumerate(out.shape) if size > 1}
    assert cut_alike(found) == (left.shape[-1] > 1)
    assert PARTIAL in {s.inputs[0] for s in found} & {s.inputs[1] for s in found}


@brief
@given(st.sampled_from(["mm", "bmm", "mv", "dot", "vdot", "outer", "ger"]), sizes, sizes, sizes, sizes, degrees)
def test_plain_products(op: str, b: int, m: int, k: int, n: int, degree: int) -> None:
    shapes = {
        "mm": ([m, k], [k, n]),
        "bmm": ([b, m, k], [b, k, n]),
        "mv": ([m, k], [k]),
        "dot": ([k], [k]),
        "vdot": ([k], [k]),
        "outer": ([m], [n]),
        "ger": ([m], [n]),
    }[op]
    out = getattr(torch, op)(*(torch.zeros(shape) for shape in shapes))
    dtype = torch.complex128 if op == "vdot" else torch.float64
    args = [tensor(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    found = check(getattr(aten, op).default, args, degree=degree)
    assert cut_outputs(found) == {d for d, size in enumerate(out.shape) if size > 1}
    assert cut_alike(found) == (k > 1 and op not in ("outer", "ger"))


@brief
@given(st.sampled_from(["addmm", "addmv", "addr", "baddbmm", "addbmm"]), st.data(), numbers, numbers, degrees)
def test_products_that_are_added(op: str, data: st.DataObject, alpha: float, beta: float, degree: int) -> None:
    b, m, k, n = (data.draw(sizes) for _ in range(4))
    left, right, out = {
        "addmm": ([m, k], [k, n], [m, n]),
        "addmv": ([m, k], [k], [m]),
        "addr": ([m], [n], [m, n]),
        "baddbmm": ([b, m, k], [b, k, n], [b, m, n]),
        "addbmm": ([b, m, k], [b, k, n], [m, n]),
    }[op]
    kept = out[data.draw(st.integers(0, len(out))) :]
    bias = [1 if data.draw(st.booleans()) else size for size in kept]
    args = [tensor(*bias), tensor(*left, seed=1), tensor(*right, seed=2)]
    found = check(getattr(aten, op).default, args, {"alpha": alpha, "beta": beta}, degree=degree)
    least = degree if op == "addmv" and bias != out else 2
    assert cut_outputs(found) == {d for d, size in enumerate(out) if size >= least}
    assert cut_alike(found) == (0 if op == "addr" else (k >= least) + (op == "addbmm" and b > 1))
    assert all(s.inputs[0] == PARTIAL for s in found if s.outputs[0] == PARTIAL)


@brief
@given(st.lists(sizes, max_size=2), st.lists(sizes, max_size=2), sizes, st.integers(0, 3), degrees)
def test_inner(rows: list[int], columns: list[int], k: int, form: int, degree: int) -> None:
    left, right = ([*rows, k] if form else []), ([*columns, k] if form != 1 else [])
    args = [tensor(*left), tensor(*right, seed=1)]
    found = check(aten.inner.default, args, degree=degree)
    out = torch.inner(*args).shape
    assert cut_outputs(found) == {d for d, size in enumerate(out) if size > 1}


@brief
@given(st.data(), degrees)
def test_tensordot(data: st.DataObject, degree: int) -> None:
    shared = data.draw(st.lists(st.integers(1, 4), max_size=2))
    free = st.lists(st.integers(1, 4), max_size=2)
    mine, theirs = data.draw(free), data.draw(free)
    left = data.draw(st.permutations([*enumerate(shared), *((-1, n) for n in mine)]))
    right = data.draw(st.permutations([*enumerate(shared), *((-1, n) for n in theirs)]))
    dims = [[[i for i, _ in side].index(j) for j in range(len(shared))] for side in (left, right)]
    args = [tensor(*(n for _, n in left)), tensor(*(n for _, n in right), seed=1), *dims]
    found = check(aten.tensordot.default, args, degree=degree)
    out = [n for i, n in left if i < 0] + [n for i, n in right if i < 0]
    assert cut_outputs(found) == {d for d, size in enumerate(out) if size > 1}
    assert cut_alike(found) == sum(n > 1 for n in shared)


@brief
@given(st.lists(sizes, min_size=1, max_size=3), st.data(), degrees)
def test_vecdot(shape: list[int], data: st.DataObject, degree: int) -> None:
    dim = data.draw(st.integers(-len(shape), -1))
    other = [1 if d - len(shape) != dim and data.draw(st.booleans()) else n for d, n in enumerate(shape)]
    other = other[data.draw(st.integers(0, len(shape) + dim)) :]
    found = check(aten.linalg_vecdot.default, [tensor(*shape), tensor(*other, seed=1)], {"dim": dim}, degree=degree)
    out = [n for d, n in enumerate(shape) if d - len(shape) != dim]
    assert cut_outputs(found) == {d for d, size in enumerate(out) if size > 1}
    assert cut_alike(found) == (shape[dim] > 1)


@brief
@given(st.lists(sizes, min_size=3, max_size=5), st.booleans(), st.booleans(), degrees)
def test_chains(lengths: list[int], row: bool, column: bool, degree: int) -> None:
    shapes = [list(pair) for pair in pairwise(lengths)]
    shapes[0] = shapes[0][row:]
    shapes[-1] = shapes[-1][: 2 - column]
    args = [tensor(*shape, seed=i) for i, shape in enumerate(shapes)]
    found = check(aten.linalg_multi_dot.default, [args], degree=degree)
    assert cut_alike(found) == sum(n > 1 for n in lengths[1:-1])


@brief
@given(st.lists(sizes, max_size=2), sizes, sizes, sizes, st.booleans(), degrees)
def test_bilinear(rows: list[int], i: int, j: int, n: int, bias: bool, degree: int) -> None:
    args = [tensor(*rows, i), tensor(*rows, j, seed=1), tensor(n, i, j, seed=2), tensor(n, seed=3) if bias else None]
    found = check(aten.bilinear.default, args, degree=degree)
    assert cut_outputs(found) == {d for d, size in enumerate([*rows, n]) if size >= degree}
    assert cut_alike(found) == (i >= degree) + (j >= degree)


# What dimensions of the output and what sums can be cut, where no size is 1.
EQUATIONS: dict[str, tuple[list[str], int, int]] = {
    "ij,jk->ik": (["ij", "jk"], 2, 1),
    "bij, bjk -> bik": (["bij", "bjk"], 3, 1),
    "ij,jk": (["ij", "jk"], 2, 1),
    "ba,cB": (["ba", "cB"], 4, 0),
    "bhqd,bhkd->bhqk": (["bhqd", "bhkd"], 4, 1),
    "...ij,...jk->...ik": (["xyij", "yjk"], 4, 1),
    "i...,...i": (["ixy", "xyi"], 2, 1),
    "...i,i->...": (["xi", "i"], 1, 1),
    "...i->i": (["xyi"], 1, 2),
    "ii->i": (["ii"], 0, 0),
    "iij,jk->k": (["iij", "jk"], 1, 1),
    "ij->": (["ij"], 0, 2),
    "ij->ji": (["ij"], 2, 0),
    "i,j,k->ijk": (["i", "j", "k"], 3, 0),
    "ai,bij,aj->ab": (["ai", "bij", "aj"], 2, 2),
    "ij,k->k": (["ij", "k"], 1, 2),
}


@settings(max_examples=subsets.examples(40), deadline=None)
@given(st.sampled_from(sorted(EQUATIONS)), st.data(), degrees)
def test_einsum(equation: str, data: st.DataObject, degree: int) -> None:
    operands, outputs, sums = EQUATIONS[equation]
    lengths = {c: data.draw(st.integers(2, 4)) for c in sorted({*"".join(operands)})}
    args = [tensor(*(lengths[c] for c in dim_labels), seed=i) for i, dim_labels in enumerate(operands)]
    found = check(aten.einsum.default, [equation, args], degree=degree)
    assert len(cut_outputs(found)) == outputs
    assert cut_alike(found) == sums
    broadcast = []
    for i, dim_labels in enumerate(operands):
        may = len(set(dim_labels)) == len(dim_labels)
        shape = [1 if may and data.draw(st.booleans()) else lengths[c] for c in dim_labels]
        broadcast.append(tensor(*shape, seed=i))
    check(aten.einsum.default, [equation, broadcast], degree=degree)


def test_terms_of_equations() -> None:
    assert parse_equation("ij,jk->ik", [2, 2]) == ([["i", "j"], ["j", "k"]], ["i", "k"])
    assert parse_equation("b...i,i...", [4, 2]) == ([["b", "1", "0", "i"], ["i", "0"]], ["1", "0", "b"])
    assert parse_equation("...,...->...", [1, 0]) == ([["0"], []], ["0"])


def test_integers_are_cut_too() -> None:
    left, right = torch.arange(12).view(3, 4), torch.arange(8).view(4, 2)
    found = check(aten.matmul.default, [left, right])
    assert cut_outputs(found) == {0, 1}
    assert cut_alike(found) == 1


@pytest.mark.parametrize(
    ("left", "right", "power", "mode"),
    [
        ((5, 3), (4, 3), 2.0, None),
        ((2, 5, 3), (4, 3), 1.0, None),
        ((30, 3), (4, 3), 2.0, None),
        ((30, 3), (4, 3), 2.0, 2),
    ],
)
def test_distances_of_rows(left: tuple[int, ...], right: tuple[int, ...], power: float, mode: int | None) -> None:
    found = check(aten.cdist.default, [tensor(*left), tensor(*right, seed=1), power, mode], degree=2)
    assert names(found) >= {"rows of the left", "rows of the right"}


def test_a_sparse_matrix_is_whole_on_every_rank() -> None:
    edges = TensorValue((4, 4), torch.float64, False, 0, is_sparse=True)
    features, result = TensorValue((4, 6), torch.float64, True, 1), TensorValue((4, 6), torch.float64, True, 0, "out")
    arguments = {"self": edges, "mat2": features}
    found = strategies(OperatorCall("aten.mm.default", arguments, (edges, features), (result,), 2))
    assert all(isinstance(strategy.inputs[0], Replicate) for strategy in found)
    assert any(strategy.inputs[1] == strategy.outputs[0] == Shard(1, even_cuts(6, 2)) for strategy in found)
