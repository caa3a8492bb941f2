"""Fits of a link: known figures are found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polylane.cluster.link import Link
from polylane.probe.fit_link import fit_link, link_errors
from tests.support.known_measurements import messages

OWN: dict[str, Any] = {
    "bandwidth": 2e9,
    "latency": 2e-4,
    "fraction": 0.5,
    "cpu": 0.9,
    "fractions": {"all_gather": 0.6, "reduce_scatter": 0.4, "all_to_all": 0.7, "send": 1.0},
    "latencies": {"all_gather": 1e-4, "reduce_scatter": 3e-4, "all_to_all": 2.5e-4, "send": 1.2e-4},
}


def same(found: Link, known: Link) -> None:
    for name in ("bandwidth", "latency", "hop", "fraction", "half", "cpu"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6, abs=1e-12), name
    assert found.fractions == pytest.approx(known.fractions, rel=1e-6)
    assert found.latencies == pytest.approx(known.latencies, rel=1e-6)
    assert (found.total is None) == (known.total is None)
    if known.total is not None:
        assert found.total == pytest.approx(known.total, rel=1e-6)


@pytest.mark.parametrize("half", [0.0, 1e5])
def test_two_workers(half: float) -> None:
    known = Link(**OWN, half=half)
    same(fit_link(messages(known, 2)), known)


@pytest.mark.parametrize(("total", "hop"), [(None, 3e-5), (5e9, 3e-5), (4.4e9, 0.0)])
def test_four_workers_that_share_something(total: float | None, hop: float) -> None:
    known = Link(**OWN, half=2e4, total=total, hop=hop)
    found = fit_link(messages(known, 4))
    same(found, known)
    assert max(link_errors(found, messages(known, 4))) < 1e-6


def test_errors_are_relative() -> None:
    known = Link(**OWN)
    slow = [replace(each, seconds=each.seconds * 2) for each in messages(known, 2)]
    assert link_errors(known, slow) == pytest.approx([0.5] * len(slow))


def test_a_rate_that_latency_hides_is_no_rate_of_fancy() -> None:
    known = Link(**{**OWN, "bandwidth": 1e15})
    small = [each for each in messages(known, 2) if each.size <= 1 << 12]
    fastest = max(each.size / each.seconds for each in small)
    assert fit_link(small).bandwidth < 100 * fastest
