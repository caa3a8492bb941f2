"""Fair shares of cores and links."""

from __future__ import annotations

import math

import pytest

from polylane.cost.network.fair_share import max_min_speeds, water_fill_level


def test_all_get_what_they_ask_for_where_there_is_enough() -> None:
    assert water_fill_level(2, [(1, 2)]) == math.inf
    assert water_fill_level(2, []) == math.inf
    assert water_fill_level(1, [(0.1, 10)]) == math.inf  # the sum is 1 but for rounding


def test_equal_users_get_equal_shares() -> None:
    assert water_fill_level(1, [(1, 4)]) == 0.25


def test_who_asks_for_little_leaves_the_rest_to_the_others() -> None:
    assert water_fill_level(1, [(1, 2), (0.2, 1)]) == pytest.approx(0.4)
    assert water_fill_level(1, [(1, 1), (0.2, 2), (0.4, 1)]) == pytest.approx(0.3)


def test_transfers_fill_links_one_after_another() -> None:
    takes = [{"x": 1.0, "y": 1.0}, {"x": 1.0}, {"x": 1.0}, {"y": 1.0}]
    assert max_min_speeds([1.0] * 4, takes, {"x": 1.0, "y": 1.0}) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_a_transfer_at_its_cap_leaves_the_rest_to_the_others() -> None:
    assert max_min_speeds([0.1, 1.0], [{"x": 1.0}, {"x": 1.0}], {"x": 1.0}) == pytest.approx([0.1, 0.9])


def test_links_of_different_capacity_are_shared_by_amount() -> None:
    assert max_min_speeds([1.0, 1.0], [{"x": 30.0}, {"x": 90.0}], {"x": 100.0}) == pytest.approx([1.0, 70 / 90])
