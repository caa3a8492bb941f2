"""Keyed random numbers of a part of a value are those of the whole, however it is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.graph.nodes.sample_slice import SampleSlice, TensorRegion
from polylane.graph.operators.counter_rng import random_bits
from polylane.graph.operators.keyed_random import KEYED
from polylane.placement.kernels.random_region import RandomInRegion
from polylane.placement.placement import PARTIAL, Cuts, Shard, even_cuts
from tests.placement.split_checks import check, join_cuts, uneven
from tests.support import subsets

CPU = torch.device("cpu")
aten = torch.ops.aten


def numbers(shape: list[int], seed: int = 0, grad: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random, dtype=torch.float64).add_(0.1).requires_grad_(grad)


@st.composite
def ranges(draw: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Some of a dimension: nothing, one stretch or several."""
    ends = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    return tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a < b)


@given(st.data())
@settings(max_examples=subsets.examples(60), deadline=None)
def test_a_region_draws_its_numbers_of_the_whole(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 4))
    rows = data.draw(st.integers(1, 2))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    batch_dim = data.draw(st.none() | st.integers(0, len(shape)))
    if batch_dim is not None:
        shape.insert(batch_dim, samples * rows)
    first = data.draw(st.sampled_from([0, 3, 1 << 29, 1 << 33]))  # beyond 32 bits, too
    part = SampleSlice(samples, first=first, batch=first + samples, step=2, seed=9)
    whole = random_bits(part, 77, shape, batch_dim, CPU)
    cut = data.draw(st.sets(st.integers(0, len(shape) - 1))) if shape else set()
    cuts = tuple((d, shape[d], data.draw(ranges(shape[d]))) for d in sorted(cut))
    for dim, _, spans in cuts:
        kept = [i for start, stop in spans for i in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(kept, dtype=torch.int64))
    drawn = random_bits(dataclasses.replace(part, region=TensorRegion(cuts)), 77, whole.shape, batch_dim, CPU)
    assert torch.equal(drawn, whole)


@pytest.mark.parametrize("shape", [[3, 70_000], [70_000, 3], [2, 300, 300], [140_000]])
def test_large_regions_are_drawn_piece_by_piece(shape: list[int]) -> None:
    whole = random_bits(SampleSlice(1, first=60_000, batch=70_000), 5, shape, 0, CPU)
    for dim, size in enumerate(shape):
        spans = ((0, size // 3), (size // 2, size - 1)) if size > 3 else ((1, size),)
        kept = torch.cat([torch.arange(start, stop) for start, stop in spans])
        part = SampleSlice(1, first=60_000, batch=70_000, region=TensorRegion(((dim, size, spans),)))
        expected = whole.index_select(dim, kept)
        assert torch.equal(random_bits(part, 5, expected.shape, 0, CPU), expected)


def test_a_region_crosses_32_bits() -> None:
    near = (1 << 12) - 1
    whole = random_bits(SampleSlice(2, first=near, batch=1 << 13), 9, [2, 1 << 10, 1 << 10], 0, CPU)
    part = SampleSlice(2, first=near, batch=1 << 13, region=TensorRegion(((1, 1 << 10, ((1000, 1024),)),)))
    assert torch.equal(random_bits(part, 9, [2, 24, 1 << 10], 0, CPU), whole[:, 1000:])


def test_a_region_says_what_does_not_fit() -> None:
    part = SampleSlice(1, region=TensorRegion(((1, 8, ((0, 4),)),)))
    for shape in ([2, 5], [2]):
        with pytest.raises(ValueError, match="no region"):
            random_bits(part, 1, shape, 0, CPU)


def test_regions_of_two_axes_make_one() -> None:
    function = KEYED["aten.dropout.default"]
    x, part = torch.ones(4, 6, 5, dtype=torch.float64), SampleSlice(4, batch=4, seed=3)
    whole = function(part, 11, 0, x, 0.5, True)
    twice = RandomInRegion(RandomInRegion(function, 2, ((1, 3),), 5), 1, ((0, 2), (4, 6)), 6)
    kept = torch.tensor([0, 1, 4, 5])
    assert twice.target is function
    assert torch.equal(twice(part, 11, 0, x[:, kept, 1:3], 0.5, True), whole[:, kept, 1:3])
    fewer = SampleSlice(2, first=1, batch=4, seed=3)  # the number of samples is that of the worker in question
    assert torch.equal(twice(fewer, 11, 0, x[1:3, kept, 1:3], 0.5, True), whole[1:3, kept, 1:3])
    with pytest.raises(ValueError, match="twice"):
        RandomInRegion(twice, 1, ((0, 1),), 4)


# Rules ---------------------------------------------------------------------------------------------------------------


def cuts_of(shape: list[int], degree: int) -> dict[tuple[str, int, int], list[Cuts]]:
    """Cuts that nobody else would ask for: uneven, with an empty part, and in two segments."""
    found: dict[tuple[str, int, int], list[Cuts]] = {}
    for dim, size in enumerate(shape):
        if size > 1:
            empty = ((0, *[size] * degree),)
            halves = join_cuts([even_cuts(size // 2, degree), even_cuts(size - size // 2, degree)])
            found["in", 0, dim] = [uneven(size, degree), empty, halves]
    return found


ATTRIBUTES: dict[str, Callable[[Tensor], tuple[list[Any], dict[str, Any]]]] = {
    "aten.dropout.default": lambda x: ([x, 0.4, True], {}),
    "aten.feature_dropout.default": lambda x: ([x, 0.4, True], {}),
    "aten.alpha_dropout.default": lambda x: ([x, 0.4, True], {}),
    "aten.feature_alpha_dropout.default": lambda x: ([x, 0.4, True], {}),
    "aten.rrelu.default": lambda x: ([x, 0.1, 0.3, True], {}),
    "aten.bernoulli.default": lambda x: ([x.clamp(0, 1)], {}),
    "aten.bernoulli.p": lambda x: ([x, 0.3], {}),
    "aten.bernoulli.Tensor": lambda x: ([x, x.clamp(0, 1)], {}),
    "aten.exponential.default": lambda x: ([x, 2.0], {}),
    "aten.normal_functional.default": lambda x: ([x, 1.0, 2.0], {}),
    "aten.uniform.default": lambda x: ([x, -1.0, 2.0], {}),
    "aten.rand_like.default": lambda x: ([x], {}),
    "aten.randn_like.default": lambda x: ([x], {"dtype": torch.float64}),
    "aten.randint_like.default": lambda x: ([x, 7], {}),
    "aten.randint_like.low_dtype": lambda x: ([x, 2, 7], {"dtype": torch.int64}),
    "aten.normal.Tensor_Tensor": lambda x: ([x, x[:1].abs()], {}),
    "aten.normal.Tensor_float": lambda x: ([x, 2.0], {}),
    "aten.normal.float_Tensor": lambda x: ([0.5, x.abs()], {}),
}
_FLOWING = frozenset(op for op in ATTRIBUTES if "dropout" in op or "rrelu" in op)  # a gradient flows through them


@pytest.mark.parametrize("op", subsets.one_in(2, ATTRIBUTES))
@given(st.data())
@settings(max_examples=4, deadline=None)
def test_keyed(op: str, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from([2, 3]))
    shape = data.draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    batch_dim = data.draw(st.sampled_from([None, 0, 1]))
    samples = shape[batch_dim] if batch_dim is not None else 1
    part = SampleSlice(samples, first=2, batch=samples + 2, step=1, seed=5)
    args, kwargs = ATTRIBUTES[op](numbers(shape, grad=False) - 0.6)
    args = [a.requires_grad_(op in _FLOWING) if isinstance(a, Tensor) else a for a in args]
    checked = check(
        KEYED[op], [part, 5, batch_dim, *args], kwargs, degree=degree, op=op, part=part, cuts=cuts_of(shape, degree)
    )
    cut = [s.outputs[0] for s in checked if isinstance(s.outputs[0], Shard)]
    assert {c.dim for c in cut} == set(range(len(shape)))
    assert any(len(c.cuts) == 2 for c in cut) or max(shape) < 4
    summands = op in ("aten.dropout.default", "aten.feature_dropout.default")
    assert any(s.outputs[0] == PARTIAL for s in checked) == summands


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("degree", [2, 3])
def test_multinomial(replacement: bool, degree: int) -> None:
    part = SampleSlice(5, first=1, batch=6, seed=2)
    args = [part, 3, 0, numbers([5, 4], grad=False), 3, replacement]
    op = "aten.multinomial.default"
    checked = check(KEYED[op], args, degree=degree, op=op, part=part, cuts={("in", 0, 0): [uneven(5, degree)]})
    assert [s.outputs[0] for s in checked if s.name == "rows"] == [
        Shard(0, even_cuts(5, degree)),
        Shard(0, uneven(5, degree)),
    ]


@pytest.mark.parametrize("op", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (0.5, True)])
def test_dropout_that_drops_nothing(op: str, p: float, train: bool) -> None:
    x = numbers([4, 3])
    if train and p:  # without a key nobody knows the numbers: whole on every rank
        found = check(getattr(aten, op).default, [x, p, train], only=lambda s: isinstance(s.outputs[0], Shard))
        assert not found
        return
    names = {str(s.outputs[0]) for s in check(getattr(aten, op).default, [x, p, train])}
    assert {"shard(0)", "shard(1)"} <= names
    assert ("partial" in names) == ("alpha" not in op)


def test_rrelu_out_of_training() -> None:
    names = {str(s.outputs[0]) for s in check(aten.rrelu.default, [numbers([4, 3]), 0.1, 0.3, False])}
    assert {"shard(0)", "shard(1)"} <= names
