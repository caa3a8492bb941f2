"""Which steps are observed: alike everywhere, no more than their budget allows, and never fewer than the bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polylane.runtime.telemetry.observed_steps import KEPT_COSTS, ObservedSteps


@given(
    cost=st.floats(1e-6, 1e-1),
    seconds=st.floats(1e-3, 1.0),
    budget=st.sampled_from([0.005, 0.02]),
    delay=st.integers(1, 4),
)
def test_observing_costs_no_more_than_its_budget(cost: float, seconds: float, budget: float, delay: int) -> None:
    steps, observed, longest = ObservedSteps(budget), list[int](), 1000
    pending = list[int]()
    for step in range(20_000):
        while pending and pending[0] <= step - delay:
            pending.pop(0)
            steps.follow_cost(cost, seconds)
        if steps.begin_step(step):
            observed.append(step)
            pending.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(observed)]
    settled = [gap for step, gap in zip(observed, gaps, strict=False) if step > delay + KEPT_COSTS]
    assert observed[0] == 0 and all(gap <= longest for gap in gaps)
    assert all(gap == longest or cost / (gap * seconds) <= budget * (1 + 1e-9) for gap in settled)


def test_a_step_that_costs_nothing_is_always_observed() -> None:
    steps = ObservedSteps()
    for step in range(10):
        if steps.begin_step(step):
            steps.follow_cost(0.0, 1.0)
    assert steps.period == 1


@pytest.mark.parametrize("costs", [[1.0, 0.001, 0.001], [0.001, 1.0, 0.001]])
def test_one_slow_look_does_not_decide(costs: list[float]) -> None:
    steps = ObservedSteps(budget=0.01)
    for cost in costs:
        steps.follow_cost(cost, 1.0)
    assert steps.period == 1
