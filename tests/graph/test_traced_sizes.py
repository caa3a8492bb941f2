"""Traced sizes: whatever was computed with them holds for all sizes at which every decision comes out the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from polylane.graph.sized_values import SizedValue, as_traced
from polylane.graph.traced_sizes import SizeTrace, TracedSize, traced_max, traced_min
from polylane.placement.placement import Shard, even_cuts, scale_cuts, slice_cuts
from polylane.placement.redistribute import Redistribute


def computed(length: Any, width: Any) -> tuple[Any, ...]:
    """What rules do with sizes: arithmetic, branches, cuts."""
    cuts = even_cuts(length, 3)
    parts = [Shard(0, cuts).local_length(rank) for rank in range(3)]
    kind = "long" if length > 2 * width else "short"
    most = traced_max(*parts) - traced_min(length, width)
    return kind, scale_cuts(cuts, 4), slice_cuts(cuts, 1, length), (length * width) // 5 % 7, -length / 2, most, parts


@given(some.tuples(*[some.integers(1, 40)] * 2), some.tuples(*[some.integers(1, 40)] * 2))
def test_a_formula_is_the_computation_where_its_guards_hold(first: tuple[int, int], other: tuple[int, int]) -> None:
    trace = SizeTrace(first)
    found = SizedValue(computed(*trace.sizes))
    trace.close()
    admits = trace.compile_guards()
    assert admits(first)
    assert as_traced(found.value) == computed(*first) == found.at(first)
    if admits(other):
        assert found.at(other) == computed(*other)


def test_even_cuts_decide_nothing() -> None:
    trace = SizeTrace((7,))
    cuts = SizedValue(even_cuts(trace.sizes[0], 3))
    trace.close()
    assert all(trace.compile_guards()((n,)) and cuts.at((n,)) == even_cuts(n, 3) for n in range(20))


def test_a_bound_may_be_infinite() -> None:
    trace = SizeTrace((4,))
    assert trace.sizes[0] < float("inf")
    least = SizedValue(traced_min(trace.sizes[0], float("inf")))
    trace.close()
    assert trace.compile_guards()((9,)) and least.at((9,)) == 9


def test_what_needs_a_number_holds_for_it_alone() -> None:
    trace = SizeTrace((4,))
    assert len(list(range(trace.sizes[0]))) == 4
    trace.close()
    assert [n for n in range(9) if trace.compile_guards()((n,))] == [4]


def test_a_decision_after_the_recording_is_an_error() -> None:
    trace = SizeTrace((4,))
    trace.close()
    with pytest.raises(AssertionError, match="decided on"):
        assert trace.sizes[0] > 3


def test_sizes_of_callables_are_found() -> None:
    trace = SizeTrace((6,))
    length, shard = trace.sizes[0], Shard(1, even_cuts(trace.sizes[0], 2))

    def add(x: int) -> int:
        return x + length

    trace.close()
    assert SizedValue(add).at((10,))(1) == 11
    assert SizedValue(partial(add, length)).at((10,))() == 20
    assert SizedValue(Redistribute(shard, shard)).at((5,)).target == Shard(1, ((0, 3, 5),))
    unsized = {"a": [1, shard.dim]}
    assert SizedValue(unsized).at((5,)) is unsized
    assert isinstance(length, TracedSize)
