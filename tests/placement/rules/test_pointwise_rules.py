"""Pointwise operators, cut along any dimension or run on summands, give what they give whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.placement.placement import PARTIAL, Cuts, Shard, even_cuts
from polylane.placement.rules.registry import is_pointwise, strategies
from polylane.placement.strategy import OperatorCall, Strategy, TensorValue
from tests.placement.split_checks import check, cut_outputs, join_cuts, uneven
from tests.support import subsets

aten = torch.ops.aten


def numbers(*shape: int, seed: int = 0, grad: bool = True, low: float = 0.1) -> Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=random, dtype=torch.float64).add_(low).requires_grad_(grad)


def mask(*shape: int) -> Tensor:
    return numbers(*shape, seed=5, grad=False) > 0.6


def on_summands(checked: list[Strategy]) -> set[tuple[int, ...]]:
    """Which inputs are summands, for every strategy that runs on some."""
    found = [tuple(i for i, p in enumerate(s.inputs) if p == PARTIAL) for s in checked]
    return {each for each in found if each}


UNARY = [
    "abs", "absolute", "celu", "clone", "contiguous", "cos", "deg2rad", "elu", "erf", "exp", "floor", "gelu",
    "hardsigmoid", "hardswish", "hardtanh", "isnan", "leaky_relu", "log", "log_sigmoid", "logical_not", "logit", "mish",
    "nan_to_num", "neg", "negative", "positive", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid", "sign",
    "silu", "sin", "softplus", "softshrink", "special_expit", "sqrt", "square", "tanh", "trunc", "zero",
]  # fmt: skip
LINEAR = {"clone", "contiguous", "deg2rad", "neg", "negative", "positive"}


@pytest.mark.parametrize("name", subsets.one_in(2, UNARY))
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([2, 3]))
@settings(max_examples=3, deadline=None)
def test_unary(name: str, shape: list[int], degree: int) -> None:
    cuts = {("in", 0, d): [uneven(n, degree), ((0, *[n] * degree),)] for d, n in enumerate(shape) if n > 1}
    checked = check(getattr(aten, name).default, [numbers(*shape, low=-0.4)], degree=degree, cuts=cuts)
    assert cut_outputs(checked) == {d for d, n in enumerate(shape) if n > 1}
    assert on_summands(checked) == ({(0,)} if name in LINEAR else set())


@st.composite
def broadcast(draw: Any, how_many: int) -> tuple[list[int], list[list[int]]]:
    """A shape, and shapes that are broadcast to it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shapes = []
    for _ in range(how_many):
        own = [draw(st.sampled_from([1, n])) for n in shape]
        shapes.append(own[draw(st.integers(0, len(own))) :])
    return shape, [*shapes[:-1], list(shape)]


@pytest.mark.parametrize(
    ("name", "summands"),
    [
        ("add", {(0, 1)}),
        ("sub", {(0, 1)}),
        ("subtract", {(0, 1)}),
        ("rsub", {(0, 1)}),
        ("mul", {(0,), (1,)}),
        ("multiply", {(0,), (1,)}),
        ("div", {(0,)}),
        ("atan2", set()),
        ("eq", set()),
        ("floor_divide", set()),
        ("greater", set()),
        ("maximum", set()),
        ("pow.Tensor_Tensor", set()),
        ("remainder", set()),
        ("xlogy", set()),
        ("copysign", set()),
        ("max.other", set()),
        ("min.other", set()),
    ],
)
@given(broadcast(2), st.booleans(), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(6), deadline=None)
def test_binary(name: str, summands: set[Any], shapes: Any, swap: bool, degree: int) -> None:
    shape, (first, second) = shapes
    base, _, overload = name.partition(".")
    grad = base != "floor_divide"  # which has no derivative
    a, b = numbers(*first, grad=grad), numbers(*second, seed=3, grad=grad)
    plain = base in ("atan2", "floor_divide", "maximum")
    operator = getattr(getattr(aten, base), overload or ("default" if plain else "Tensor"))
    kwargs = {"alpha": 2.5} if base in ("add", "sub", "subtract", "rsub") else {}
    checked = check(operator, [b, a] if swap else [a, b], kwargs, degree=degree)
    assert cut_outputs(checked) == {d for d, n in enumerate(shape) if n > 1}
    assert on_summands(checked) == summands


def test_a_rounded_quotient_is_not_linear() -> None:
    args = [numbers(4, 3), numbers(3)]
    for mode in ("floor", "trunc"):
        checked = check(aten.div.Tensor_mode, args, {"rounding_mode": mode})
        assert cut_outputs(checked) == {0, 1}
        assert not on_summands(checked)
    assert on_summands(check(aten.div.Tensor_mode, args, {"rounding_mode": None})) == {(0,)}


@pytest.mark.parametrize(
    ("operator", "args", "summands"),
    [
        (aten.add.Scalar, [2.0], set()),
        (aten.add.Tensor, [2.0], set()),
        (aten.rsub.Scalar, [2.0], set()),
        (aten.add.Tensor, [0], {(0,)}),
        (aten.mul.Tensor, [2.0], {(0,)}),
        (aten.mul.Scalar, [2], {(0,)}),
        (aten.div.Tensor, [2.0], {(0,)}),
        (aten.pow.Tensor_Scalar, [2], set()),
        (aten.clamp.default, [0.2, 0.6], set()),
        (aten.threshold.default, [0.2, 0.6], set()),
        (aten.fill.Scalar, [0.2], set()),
        (aten.masked_fill.Scalar, [mask(3), 0.0], {(0,)}),
        (aten.masked_fill.Scalar, [mask(3), -1e9], set()),
    ],
)
def test_with_numbers(operator: Any, args: list[Any], summands: set[Any]) -> None:
    checked = check(operator, [numbers(4, 3), *args], degree=3)
    assert cut_outputs(checked) == {0, 1}
    assert on_summands(checked) == summands


TERNARY = [
    (aten.where.self, lambda a, b, c: [mask(4, 3), a, b], {}, {(1, 2)}),
    (aten.where.ScalarOther, lambda a, b, c: [mask(4, 3), a, 0.0], {}, {(1,)}),
    (aten.where.ScalarOther, lambda a, b, c: [mask(4, 3), a, 1.0], {}, set()),
    (aten.where.ScalarSelf, lambda a, b, c: [mask(4, 3), 0.0, a], {}, {(1,)}),
    (aten.masked_fill.Tensor, lambda a, b, c: [a, mask(3), c], {}, {(0, 2)}),
    (aten.fill.Tensor, lambda a, b, c: [a, c], {}, set()),
    (aten.lerp.Tensor, lambda a, b, c: [a, b, c], {}, {(0, 1)}),
    (aten.lerp.Scalar, lambda a, b, c: [a, b, 0.3], {}, {(0, 1)}),
    (aten.addcmul.default, lambda a, b, c: [a, b, c], {"value": 0.7}, {(0, 1), (0, 2)}),
    (aten.addcdiv.default, lambda a, b, c: [a, b, c], {"value": 0.7}, {(0, 1)}),
    (aten.clamp.Tensor, lambda a, b, c: [a, c * 0.1, b], {}, set()),
    (aten.copy.default, lambda a, b, c: [a, b], {}, {(1,)}),
    # Backward passes, of gradients that a loss takes inside: linear in the gradient, not in the value.
    (aten.tanh_backward.default, lambda a, b, c: [a, a * 0.3], {}, {(0,)}),
    (aten.sigmoid_backward.default, lambda a, b, c: [a, a * 0.3], {}, {(0,)}),
    (aten.silu_backward.default, lambda a, b, c: [a, a * 0.3], {}, {(0,)}),
    (aten.gelu_backward.default, lambda a, b, c: [a, a * 0.3], {}, {(0,)}),
    (aten.threshold_backward.default, lambda a, b, c: [a, a * 0.3, 0.2], {}, {(0,)}),
]


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("operator", "args", "kwargs", "summands"), TERNARY)
def test_of_several(operator: Any, args: Any, kwargs: dict[str, Any], summands: set[Any], degree: int) -> None:
    given = args(numbers(4, 3), numbers(3, seed=1), numbers(seed=2))
    grad = operator not in (aten.copy.default, aten.silu_backward.default)  # which have no derivative
    given = [g.detach().requires_grad_(grad and g.requires_grad) if isinstance(g, Tensor) else g for g in given]
    checked = check(operator, given, kwargs, degree=degree)
    assert cut_outputs(checked) == {0, 1}
    assert on_summands(checked) == summands


def test_the_same_value_twice() -> None:
    x = numbers(4, 3)
    assert on_summands(check(aten.mul.Tensor, [x, x])) == {(0,), (1,)}


def test_what_finds_positions_is_not_cut() -> None:
    assert not is_pointwise("aten.where.default")
    x = TensorValue((4, 3), torch.bool, False, 0)
    out = TensorValue((5,), torch.int64, False, 0, "out")
    offered = strategies(OperatorCall("aten.where.default", {"condition": x}, (x,), (out,), 2))
    assert not any(isinstance(s.inputs[0], Shard) for s in offered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_casts(dtype: torch.dtype) -> None:
    x, other = numbers(4, 3), torch.zeros(2, 5, 7, 3).to(dtype)
    grad = {(0,)} if dtype.is_floating_point else set()
    for operator, args, kwargs in (
        (aten.to.dtype, [x, dtype], {}),
        (aten._to_copy.default, [x], {"dtype": dtype}),
        (aten.to.other, [x, other], {}),
        (aten.type_as.default, [x, other], {}),
    ):
        checked = check(operator, args, kwargs, tolerance=1e-5)
        assert cut_outputs(checked) == {0, 1}
        assert on_summands(checked) == grad
    alike = check(aten.type_as.default, [x, torch.zeros(4, 3).to(dtype)], tolerance=1e-5)
    assert any(isinstance(p, Shard) for s in alike for p in s.inputs[1:])  # cut along: nothing travels for a type


def test_complex() -> None:
    a, b = numbers(4, 3), numbers(4, 3, seed=1)
    for operator in (aten.complex.default, aten.polar.default):
        assert cut_outputs(check(operator, [a, b], degree=3)) == {0, 1}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(10), deadline=None)
def test_prelu(shape: list[int], single: bool, degree: int) -> None:
    slopes = numbers(1 if single or len(shape) == 1 else shape[1], seed=1)
    checked = check(aten.prelu.default, [numbers(*shape, low=-0.5), slopes], degree=degree)
    assert cut_outputs(checked) == {d for d, n in enumerate(shape) if n > 1}
    if len(slopes) > 1:
        assert any(isinstance(s.inputs[1], Shard) for s in checked)


@given(st.integers(0, 2), st.integers(1, 4), st.sampled_from([2, 3]))
@settings(max_examples=subsets.examples(15), deadline=None)
def test_glu(dim: int, half: int, degree: int) -> None:
    shape = [3, 2, 4]
    shape[dim] = 2 * half
    asked: dict[tuple[str, int, int], list[Cuts]] = {}
    if half > 1:
        asked = {("in", 0, dim): [join_cuts([uneven(half, degree)] * 2), uneven(2 * half, degree)]}
    checked = check(aten.glu.default, [numbers(*shape), dim - 3], degree=degree, cuts=asked)
    assert cut_outputs(checked) == {d for d in range(3) if d != dim or half > 1}
    for strategy in checked:
        out, given = strategy.outputs[0], strategy.inputs[0]
        if isinstance(out, Shard) and out.dim == dim:
            assert given == Shard(dim, join_cuts([out.cuts, out.cuts]))
    if half > 1:
        found = {s.outputs[0] for s in checked}
        assert {Shard(dim, even_cuts(half, degree)), Shard(dim, uneven(half, degree))} <= found


def test_in_place_is_whole() -> None:
    x = TensorValue((4, 3), torch.float64, True, 0)
    call = OperatorCall("aten.add_.Scalar", {"self": x, "other": 1}, (x,), (x,), 2, written_inputs=frozenset({0}))
    assert [s.name for s in strategies(call)] == ["replicate"]
