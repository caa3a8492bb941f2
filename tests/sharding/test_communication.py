"""Collectives cost what the alpha-beta model says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.cost.network.alpha_beta import (
    RankSpeed,
    bytes_per_rank,
    collective_seconds,
    exchange_seconds,
)

NAMES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@given(st.floats(0, 1e12), st.integers(2, 64))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: float, degree: int) -> None:
    both = bytes_per_rank("reduce_scatter", size, degree) + bytes_per_rank("all_gather", size, degree)
    assert bytes_per_rank("all_reduce", size, degree) == pytest.approx(both)
    assert bytes_per_rank("all_to_all", size, degree) == pytest.approx(
        bytes_per_rank("all_gather", size, degree) / degree
    )


@given(st.sampled_from(NAMES), st.integers(0, 10**9), st.integers(2, 64))
def test_seconds(name: str, size: int, degree: int) -> None:
    rates = RankSpeed(latency=1e-3, bandwidth=1e8)
    travel = bytes_per_rank(name, size, degree) / 1e8
    assert collective_seconds(name, size, degree, rates) == pytest.approx(1e-3 + travel)


def test_nothing_travels() -> None:
    assert (
        collective_seconds("", 100, 4, RankSpeed())
        == bytes_per_rank("", 100, 4)
        == collective_seconds("all_reduce", 100, 1, RankSpeed())
        == 0
    )
    assert exchange_seconds(0, 0, RankSpeed()) == 0
    assert exchange_seconds(2e9, 2, RankSpeed(latency=1, bandwidth=1e9)) == pytest.approx(4)
    with pytest.raises(ValueError):
        bytes_per_rank("scatter", 1, 2)
