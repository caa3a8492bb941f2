"""Losses that take gradients inside train to the numbers of one device by every family of plans, undeclared."""

from __future__ import annotations

import pytest

from tests.equivalence.gradients_inside import INSIDE
from tests.equivalence.same_numbers import EQUAL, judged
from tests.equivalence.trainings.training import PLANS

EVERY = [(name, plan) for name in INSIDE for plan in (*PLANS, "sequence=2")]
FAST = [("equation", "data=2,pipeline=2,microbatches=2")]


def check(name: str, plan: str) -> None:
    outcome = judged(INSIDE[name](), plan)
    assert outcome.kind == EQUAL, f"{name} by {plan}: {outcome} {outcome.told}"


@pytest.mark.parametrize(("name", "plan"), FAST)
def test_they_train_to_the_same_numbers(name: str, plan: str) -> None:
    check(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [each for each in EVERY if each not in FAST])
def test_all_other_plans(name: str, plan: str) -> None:
    check(name, plan)
