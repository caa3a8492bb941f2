"""Fair shares of cores."""

from __future__ import annotations

import math

import pytest

from polylane.cost.simulator.shared_cores import water_fill_level


def test_all_get_what_they_ask_for_where_there_is_enough() -> None:
    assert water_fill_level(2, [(1, 2)]) == math.inf
    assert water_fill_level(2, []) == math.inf
    assert water_fill_level(1, [(0.1, 10)]) == math.inf  # the sum is 1 but for rounding


def test_equal_users_get_equal_shares() -> None:
    assert water_fill_level(1, [(1, 4)]) == 0.25


def test_who_asks_for_little_leaves_the_rest_to_the_others() -> None:
    assert water_fill_level(1, [(1, 2), (0.2, 1)]) == pytest.approx(0.4)
    assert water_fill_level(1, [(1, 1), (0.2, 2), (0.4, 1)]) == pytest.approx(0.3)
