"""Reductions, scans, sorting and softmax, split in every way, give what they give whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from polylane.graph.nodes.facts import UnderSetting
from polylane.placement.kernels.reduction import PowerNorm, ShardedReduction, ShardedSoftmax
from polylane.placement.operator_view import ViewSizes, make_call
from polylane.placement.placement import PARTIAL, REPLICATE, Replicate, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.rules.registry import strategies
from tests.placement.split_checks import (
    Ring,
    ThreadAxis,
    check,
    cut_inputs,
    large_dims,
    on_threads,
    uneven_cuts,
)
from tests.support import subsets

aten = torch.ops.aten


def numbers(shape: list[int], seed: int = 0, grad: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_(grad)


@st.composite
def reductions(draw: Any) -> tuple[list[int], list[int], bool, int]:
    """A shape, dimensions to reduce (counted from either end), keepdim and degree."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    back = draw(st.booleans())
    return shape, [d - len(shape) for d in dims] if back else dims, draw(st.booleans()), draw(st.sampled_from([2, 3]))


def single(shape: list[int], dims: list[int]) -> tuple[int, set[int]]:
    """The first of the dimensions, and all others that can be cut."""
    return dims[0], large_dims(shape) - {dims[0] % len(shape)}


# Of several dimensions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum.dim_IntList", "mean.dim", "nansum"])
@given(reductions())
@settings(max_examples=subsets.examples(8), deadline=None)
def test_additive(name: str, of: tuple[list[int], list[int], bool, int]) -> None:
    shape, dims, keepdim, degree = of
    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload or "default")
    checked = check(operator, [numbers(shape), dims, keepdim], degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)
    partial = {s.inputs[0].dim for s in checked if isinstance(s.inputs[0], Shard) and s.outputs[0] == PARTIAL}
    assert partial == {d % len(shape) for d in dims} & large_dims(shape)
    assert any(s.inputs[0] == PARTIAL for s in checked) == (base != "nansum")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_sums_of_whole_numbers(dtype: torch.dtype) -> None:
    x = (numbers([4, 5], grad=False) * 3).to(dtype)
    for operator, args in ((aten.sum.default, [x]), (aten.sum.dim_IntList, [x, [1]]), (aten.count_nonzero.default, [x]),
                           (aten.count_nonzero.dim_IntList, [x, [0]])):  # fmt: skip
        checked = check(operator, args, degree=3)
        assert cut_inputs(checked) == {0, 1}


def test_sums_of_everything_in_another_type() -> None:
    x = numbers([4, 5], grad=False).float().requires_grad_()
    for operator in (aten.sum.default, aten.mean.default):
        for degree in (2, 3):
            checked = check(operator, [x], {"dtype": torch.float64}, degree=degree, tolerance=1e-6)
            assert cut_inputs(checked) == {0, 1}


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@given(reductions(), st.sampled_from(["correction", "dim"]), st.sampled_from([0, 1, 0.5]))
@settings(max_examples=subsets.examples(8), deadline=None)
def test_variance(name: str, of: tuple[list[int], list[int], bool, int], overload: str, correction: float) -> None:
    shape, dims, keepdim, degree = of
    shape = [n + 1 for n in shape]  # one value has no variance
    if overload == "dim":
        args, kwargs = [numbers(shape), dims, bool(correction), keepdim], {}
    else:
        args, kwargs = [numbers(shape), dims], {"correction": correction, "keepdim": keepdim}
    operator = getattr(getattr(aten, name), overload)
    checked = check(operator, args, kwargs, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)


def test_deviation_of_equal_values() -> None:
    x = torch.full((3, 4), 2.0, dtype=torch.float64, requires_grad=True)
    assert cut_inputs(check(aten.std.correction, [x, [1]], degree=3)) == {0, 1}
    assert cut_inputs(check(aten.var.default, [numbers([3, 4])], degree=3)) == {0, 1}


@pytest.mark.parametrize("order", [0.5, 1.0, 1.5, 2, 3.0])
@given(reductions())
@settings(max_examples=subsets.examples(5), deadline=None)
def test_norms(order: float, of: tuple[list[int], list[int], bool, int]) -> None:
    shape, dims, keepdim, degree = of
    x = numbers(shape, grad=False)
    x.view(-1)[:1] = 0.0
    x = x.requires_grad_()
    args = [x, order, dims, keepdim]
    checked = check(aten.linalg_vector_norm.default, args, degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)
    assert cut_inputs(check(aten.norm.ScalarOpt_dim, args, degree=degree)) == large_dims(shape)
    assert cut_inputs(check(aten.norm.Scalar, [x, order], degree=degree)) == large_dims(shape)


@pytest.mark.parametrize("order", [0.0, math.inf, -math.inf, -1.0])
def test_norms_of_other_orders(order: float) -> None:
    x = numbers([3, 4])
    assert cut_inputs(check(aten.linalg_vector_norm.default, [x, order, [1]], degree=2)) == {0}


def test_norm_of_nothing_but_zeros() -> None:
    x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    assert cut_inputs(check(aten.linalg_vector_norm.default, [x, 2, [0]], degree=2)) == {0, 1}


@pytest.mark.parametrize("name", ["amax", "amin", "any.dims", "all.dims"])
@given(reductions())
@settings(max_examples=subsets.examples(6), deadline=None)
def test_extremes(name: str, of: tuple[list[int], list[int], bool, int]) -> None:
    shape, dims, keepdim, degree = of
    base, _, overload = name.partition(".")
    x = numbers(shape, grad=False).mul(2).round()  # some are equal
    x = x.requires_grad_(base[:1] == "a" and base[1:2] == "m")
    operator = getattr(getattr(aten, base), overload or "default")
    checked = check(operator, [x, dims, keepdim], degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ["max", "min", "any", "all"])
def test_extremes_of_everything(name: str, dtype: torch.dtype) -> None:
    x = numbers([4, 5], grad=False).mul(2).round().abs().to(dtype)
    if dtype.is_floating_point and name in ("max", "min"):
        x.requires_grad_()
    operator = getattr(aten, name).default
    assert cut_inputs(check(operator, [x], degree=3)) == {0, 1}


@given(reductions(), st.sampled_from([0.0, 1e3, -math.inf]))
@settings(max_examples=subsets.examples(20), deadline=None)
def test_logsumexp(of: tuple[list[int], list[int], bool, int], shift: float) -> None:
    shape, dims, keepdim, degree = of
    x = numbers(shape, grad=False)
    x.view(-1)[:1] += shift
    x = x.requires_grad_()
    checked = check(aten.logsumexp.default, [x, dims, keepdim], degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)


# Along one dimension -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["prod.dim_int", "nanmean", "max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode",
             "aminmax", "kthvalue"],
)  # fmt: skip
@given(reductions())
@settings(max_examples=4, deadline=None)
def test_others_keep_what_they_reduce(name: str, of: tuple[list[int], list[int], bool, int]) -> None:
    shape, dims, keepdim, degree = of
    dim, others = single(shape, dims)
    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload or "default")
    x = numbers(shape)
    if base == "aminmax":
        checked = check(operator, [x], {"dim": dim, "keepdim": keepdim}, degree=degree, cuts=uneven_cuts(shape, degree))
    else:
        args: list[Any] = {"kthvalue": [1, dim, keepdim], "nanmean": [[dim], keepdim]}.get(base, [dim, keepdim])
        checked = check(operator, [x, *args], degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == others


@pytest.mark.parametrize(
    ("order", "dims", "kept"), [(None, [1, 2], {0}), (2, [-1], {0, 1}), ("fro", [0, 2], {1}), (None, None, set())]
)
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_keep_what_they_are_over(order: Any, dims: list[int] | None, kept: set[int], keepdim: bool) -> None:
    operator = aten.linalg_norm.ord_str if isinstance(order, str) else aten.linalg_norm.default
    assert cut_inputs(check(operator, [numbers([3, 4, 5]), order, dims, keepdim])) == kept


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@given(reductions(), st.sampled_from([torch.float64, torch.int64, torch.uint8]))
@settings(max_examples=subsets.examples(12), deadline=None)
def test_positions_of_extremes(name: str, of: tuple[list[int], list[int], bool, int], dtype: torch.dtype) -> None:
    shape, dims, keepdim, degree = of
    # Few different values: the first of equal ones counts, on whichever rank it is.
    x = (numbers(shape, grad=False) * 2).round().abs().to(dtype)
    checked = check(getattr(aten, name).default, [x, dims[0], keepdim], degree=degree, cuts=uneven_cuts(shape, degree))
    assert cut_inputs(checked) == large_dims(shape)


def test_positions_of_nan_and_infinities() -> None:
    x = torch.tensor([[1.0, math.inf, 2, math.nan, 3, math.nan], [-math.inf, 1, math.inf, 2, math.inf, -1]])
    x = torch.cat([x, torch.full((1, 6), -math.inf)])
    for operator in (aten.argmax.default, aten.argmin.default):
        assert cut_inputs(check(operator, [x, 1, False], degree=3)) == {0, 1}


def test_reductions_to_one_position_are_whole() -> None:
    x = numbers([3, 4])
    for operator in (aten.argmax.default, aten.median.default, aten.prod.default):
        assert not cut_inputs(check(operator, [x]))


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cumsum", []), ("cumprod", []), ("cummax", []), ("cummin", []), ("logcumsumexp", []), ("sort", [True]),
        ("argsort", [True]), ("topk", None),
    ],
)  # fmt: skip
@given(reductions())
@settings(max_examples=4, deadline=None)
def test_along(name: str, after: list[Any] | None, of: tuple[list[int], list[int], bool, int]) -> None:
    shape, dims, _, degree = of
    dim, others = single(shape, dims)
    args: list[Any] = [dim, *after] if after is not None else [1, dim, False]
    checked = check(
        getattr(aten, name).default, [numbers(shape), *args], degree=degree, cuts=uneven_cuts(shape, degree)
    )
    assert cut_inputs(checked) == others
    assert any(s.inputs[0] == PARTIAL for s in checked) == (name == "cumsum")


def test_sort_by_name() -> None:
    checked = check(aten.sort.stable, [numbers([3, 4])], {"stable": True, "dim": 0, "descending": True})
    assert cut_inputs(checked) == {1}
    assert cut_inputs(check(aten.msort.default, [numbers([3, 4])])) == {1}


@given(st.integers(-3, 2), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(6), deadline=None)
def test_cosine_similarity(dim: int, degree: int) -> None:
    a, b = numbers([3, 4, 2]), numbers([1, 4, 1], seed=1)
    checked = check(aten.cosine_similarity.default, [a, b, dim], degree=degree)
    assert cut_inputs(checked) == {0, 1, 2} - {dim % 3}


@pytest.mark.parametrize("keepdim", [False, True])
def test_pairwise_distance(keepdim: bool) -> None:
    a, b = numbers([3, 4, 2]), numbers([4, 2], seed=1)
    checked = check(aten.pairwise_distance.default, [a, b, 2.0, 1e-6, keepdim])
    assert cut_inputs(checked) == {0, 1}


@pytest.mark.parametrize("ends", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, -1])
def test_diff(dim: int, ends: int) -> None:
    more = [numbers([1, 4] if dim == 0 else [3, 1], seed=i) for i in range(ends)]
    checked = check(aten.diff.default, [numbers([3, 4]), 1, dim, *more], degree=3)
    assert cut_inputs(checked) == {1 + dim if dim == 0 else 0}
    assert any(s.inputs[0] == PARTIAL for s in checked)


# Softmax -------------------------------------------------------------------------------------------------------------

SOFTMAX = {
    "softmax.int": [],
    "log_softmax.int": [torch.float64],
    "special_softmax.default": [],
    "_safe_softmax.default": [],
    "_softmax.default": [False],
    "_log_softmax.default": [False],
}


@pytest.mark.parametrize("name", SOFTMAX)
@given(reductions(), st.booleans())
@settings(max_examples=subsets.examples(6), deadline=None)
def test_softmax(name: str, of: tuple[list[int], list[int], bool, int], masked: bool) -> None:
    shape, dims, _, degree = of
    dim = dims[0]
    base, _, overload = name.partition(".")
    x = numbers(shape, grad=False) * 30
    if masked:
        x = x.masked_fill(numbers(shape, seed=9, grad=False) > 0.8, -math.inf)
    checked = check(
        getattr(getattr(aten, base), overload), [x.detach().requires_grad_(), dim, *SOFTMAX[name]],
        degree=degree, cuts=uneven_cuts(shape, degree),
    )  # fmt: skip
    assert cut_inputs(checked) == large_dims(shape)
    over = [s for s in checked if s.name.startswith("over")]
    assert all(s.sent > 0 and s.messages == 3 and s.inputs == s.outputs for s in over)


def test_safe_softmax_of_nothing_gives_zeros() -> None:
    x = numbers([3, 5], grad=False)
    x[1] = -math.inf
    checked = check(aten._safe_softmax.default, [x.requires_grad_(), 1], degree=3, cuts=uneven_cuts([3, 5], 3))
    assert cut_inputs(checked) == {0, 1}


def test_in_a_narrow_type_sums_are_wide() -> None:
    """Sums of many numbers: bfloat16 could not even count them."""
    x = (torch.arange(4000) % 7).to(torch.bfloat16)
    cut = Shard(0, even_cuts(4000, 2))

    def softmax(axis: ThreadAxis) -> Tensor:
        own = x[slice(*cut.ranges(axis.index)[0])].clone()
        return ShardedSoftmax(0, torch.bfloat16)([axis], own)

    def norm(axis: ThreadAxis) -> Tensor:
        own = x[slice(*cut.ranges(axis.index)[0])].clone()
        return ShardedReduction(PowerNorm, [0], False, torch.bfloat16, 2.0)([axis], own)

    parts = on_threads(2, softmax)
    assert torch.equal(torch.cat(parts), x.softmax(0))
    assert all(torch.equal(each, x.norm()) for each in on_threads(2, norm))


class InFloat32(UnderSetting):
    """An operator as autocast runs some: in float32, whatever it is given."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.target(x.float(), *args, **kwargs)


@pytest.mark.parametrize(
    "name", ["softmax.int", "var.correction", "logsumexp", "linalg_vector_norm", "mean.dim", "amax"]
)
def test_a_type_that_autocast_gives_is_kept(name: str) -> None:
    base, _, overload = name.partition(".")
    args = {"softmax": [1], "linalg_vector_norm": [2, [1]]}.get(base, [[1]])
    target = InFloat32(getattr(getattr(aten, base), overload or "default"))
    x = torch.randn(4, 6).to(torch.bfloat16)
    whole = target(x, *args)
    graph = fx.Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta = {"val": x.to("meta"), "role": ("input", 0)}
    node = graph.call_function(target, (placeholder, *args))
    node.meta = {"val": whole.to("meta"), "name": "op", "op": f"aten.{base}.{overload or 'default'}"}
    graph.output((node,))
    call, _ = make_call(node, ViewSizes(1), 2, lambda _: False)
    strategy = next(s for s in strategies(call) if s.name == "over dim b")

    def work(axis: ThreadAxis) -> Tensor:
        split = AxisSplit(2, {"op": strategy}, {("input:0", 0): REPLICATE})
        own = rewrite(graph, {"op": call}, {"x": split}, 1, {"x": axis.index})
        return fx.Interpreter(fx.GraphModule({}, own)).run(axis, x)[0]

    assert whole.dtype == torch.float32
    for out in on_threads(2, work):
        torch.testing.assert_close(out, whole)


# Two axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mean", "var", "std", "logsumexp", "amax", "linalg_vector_norm"])
def test_both_axes_cut_what_is_reduced(name: str) -> None:
    """One after the other: the ranks of both axes make up the whole."""
    x = numbers([4, 6])
    args = {"linalg_vector_norm": [2, [0, 1]]}.get(name, [[0, 1]])
    overload = {"mean": "dim", "var": "correction", "std": "correction"}.get(name, "default")
    operator = getattr(getattr(aten, name), overload)
    whole = operator(x, *args)
    whole.backward()
    graph = fx.Graph()
    placeholder = graph.placeholder("x")
    placeholder.meta = {"val": x.to("meta"), "role": ("parameter", "x")}
    node = graph.call_function(operator, (placeholder, *args))
    node.meta = {"val": whole.detach().to("meta"), "name": "op"}
    graph.output((node,))
    call, _ = make_call(node, ViewSizes(1), 2, lambda _: True)
    over = {s.inputs[0].dim: s for s in strategies(call) if s.name.startswith("over")}  # type: ignore[union-attr]

    grid = _Grid(2, 2)

    def work(axis: ThreadAxis) -> tuple[Tensor, Tensor | None]:
        own = x.detach().clone().requires_grad_()
        row, column = divmod(axis.index, 2)
        splits = {a: AxisSplit(2, {"op": over[d]}, {("parameter:x", 0): Replicate()}) for a, d in (("a", 0), ("b", 1))}
        code = rewrite(graph, {"op": call}, splits, 1, {"a": row, "b": column})
        a, b = grid.axes(row, column)
        out = fx.Interpreter(fx.GraphModule({}, code)).run(a, b, own)[0]
        out.backward()
        return out.detach(), own.grad

    for out, grad in on_threads(4, work):
        torch.testing.assert_close(out, whole.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-14)


class _Grid:
    """Ranks in rows and columns: an axis along each."""

    def __init__(self, rows: int, columns: int) -> None:
        self.down = [Ring(rows) for _ in range(columns)]
        self.across = [Ring(columns) for _ in range(rows)]

    def axes(self, row: int, column: int) -> tuple[ThreadAxis, ThreadAxis]:
        return ThreadAxis(self.down[column], row), ThreadAxis(self.across[row], column)


@pytest.mark.parametrize("op", [aten.sum.default, aten.mean.default, aten.cumsum.default, aten.diff.default])
def test_summands_of_complex_numbers(op: Any) -> None:
    x = torch.complex(numbers([4, 3], grad=False), numbers([4, 3], seed=1, grad=False)).requires_grad_()
    found = check(op, [x, 0] if op is aten.cumsum.default else [x])
    assert PARTIAL in {s.outputs[0] for s in found if s.name == "summands"}
