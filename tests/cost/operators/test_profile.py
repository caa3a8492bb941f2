"""A profile's lines go through what was measured, and a clock of it scales with what a rank has."""

from __future__ import annotations

import pytest

from polylane.cost.cost_table import OperatorWork
from polylane.cost.operators.profile import Profile, ProfileClock
from polylane.placement.operator_view import OperatorNode, view_operators
from tests.support import planning_graphs

PROFILE = Profile(
    (2, 4), {"a": ((1.0, 2.0), (3.0, 4.0))}, ((2.0, 2.0), (6.0, 8.0)), shared={"a": ((5.0, 6.0), (7.0, 8.0))}
)


@pytest.mark.parametrize(
    "samples, seconds", [(2, (1.0, 2.0)), (3, (2.0, 3.0)), (4, (3.0, 4.0)), (8, (7.0, 8.0)), (1, (0.05, 1.0))]
)
def test_between_and_beyond_the_measured_sizes(samples: int, seconds: tuple[float, float]) -> None:
    assert PROFILE.node_seconds("a", samples) == pytest.approx(seconds)
    assert PROFILE.node_seconds("unknown", samples) == (0.0, 0.0)


def test_one_size_is_in_proportion() -> None:
    assert Profile((4,), {"a": ((2.0, 4.0),)}, ((2.0, 4.0),)).node_seconds("a", 2) == pytest.approx((1.0, 2.0))


def test_whole_passes_come_out_as_measured() -> None:
    assert PROFILE.step_to_nodes_ratio(2) == pytest.approx((2.0, 1.0))
    assert PROFILE.step_to_nodes_ratio(4) == pytest.approx((2.0, 2.0))


class Halves:
    """A model that takes as long as a first input has rows."""

    def __call__(self, work: OperatorWork) -> tuple[float, float]:
        return float(work.inputs[0][0]), float(work.inputs[0][0])

    def issued(self, work: OperatorWork) -> tuple[float, float]:
        return 0.0, 0.0


def test_a_rank_takes_its_share_of_the_measured_time() -> None:
    step = _named("a")
    clock = ProfileClock(PROFILE, Halves(), speed=0.5)
    whole = OperatorWork(step, 2, ((4, 4),), ((4, 4),), ((4, 4),), ((4, 4),), None)
    half = OperatorWork(step, 2, ((2, 4),), ((2, 4),), ((4, 4),), ((4, 4),), None)
    shared = OperatorWork(step, 2, ((4, 4),), ((4, 4),), ((4, 4),), ((4, 4),), None, shares_statistics=True)
    assert clock(whole) == pytest.approx((4.0, 4.0)), "seconds x ratio / speed"
    assert clock(half) == pytest.approx((2.0, 2.0))
    assert clock(shared) == pytest.approx((20.0, 12.0))


def _named(name: str) -> OperatorNode:
    from dataclasses import replace

    return replace(view_operators(planning_graphs.blocks(2, 16), 2, 1).operators[0], name=name)
