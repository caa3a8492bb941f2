"""Collectives cost what the alpha-beta model says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.cost.communicate import Rates, exchange, overlapped, seconds, sent

NAMES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@given(st.floats(0, 1e12), st.integers(2, 64))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: float, degree: int) -> None:
    both = sent("reduce_scatter", size, degree) + sent("all_gather", size, degree)
    assert sent("all_reduce", size, degree) == pytest.approx(both)
    assert sent("all_to_all", size, degree) == pytest.approx(sent("all_gather", size, degree) / degree)


@given(st.sampled_from(NAMES), st.integers(0, 10**9), st.integers(2, 64))
def test_seconds(name: str, size: int, degree: int) -> None:
    rates = Rates(latency=1e-3, bandwidth=1e8)
    assert seconds(name, size, degree, rates) == pytest.approx(1e-3 + overlapped(name, size, degree, rates))
    assert overlapped(name, size, degree, rates) == pytest.approx(sent(name, size, degree) / 1e8)


def test_nothing_travels() -> None:
    assert seconds("", 100, 4, Rates()) == sent("", 100, 4) == seconds("all_reduce", 100, 1, Rates()) == 0
    assert exchange(0, 0, Rates()) == 0
    assert exchange(2e9, 2, Rates(latency=1, bandwidth=1e9)) == pytest.approx(4)
    with pytest.raises(ValueError):
        sent("scatter", 1, 2)
