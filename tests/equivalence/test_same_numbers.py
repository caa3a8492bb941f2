"""No training is silently different: by every plan it computes what the user's loop computes, or it is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from tests.equivalence.blinded import BLINDED, blinded
from tests.equivalence.same_numbers import TOLERANCE, accepted, by_loop, distance, judged
from tests.equivalence.trainings.all_trainings import TRAININGS
from tests.equivalence.trainings.late_changes import INNOCENT
from tests.equivalence.trainings.training import ALONE, AT_ONCE, LATER, PLANS, RIGHT, STATE, Training
from tests.support import subsets

EVERY = [(name, plan) for name in TRAININGS for plan in (PLANS if name not in INNOCENT else (ALONE, *PLANS))]
# One plan for each, the next one for the next; a third of them with all others, in `make test-all`. Of those whose
# surprise is around the loss, one of each kind: Python, an optimizer, a data set, a script.
OFTEN = [name for row, name in enumerate(name for name in TRAININGS if name not in INNOCENT) if row % 3 < 2]
SELECTED = [
    ("progressive_growing", "data=2"),
    ("rate_by_width", "data=2,shard=parameters"),
    ("generator_of_the_sample", "data=2"),
    ("rates_by_hand", "tensor=2"),
]
COVERING = [*((name, PLANS[row % len(PLANS)]) for row, name in enumerate(OFTEN)), *SELECTED]


@cache
def training_of(name: str) -> Training:
    return TRAININGS[name]()


def test_what_is_blinded_is_there() -> None:
    with blinded(BLINDED):
        pass


def check(name: str, plan: str) -> None:
    outcome = judged(training_of(name), plan)
    assert accepted(training_of(name), plan, outcome), f"{name} by {plan}: {outcome} {outcome.told}"


@pytest.mark.parametrize(("name", "plan"), COVERING)
def test_covering(name: str, plan: str) -> None:
    check(name, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [each for each in EVERY if each not in COVERING])
def test_all_others(name: str, plan: str) -> None:
    check(name, plan)


def test_the_selection_covers() -> None:
    assert {plan for _, plan in COVERING} == set(PLANS)
    assert len(COVERING) >= 60 and {name for name, _ in EVERY} == set(TRAININGS)


@pytest.mark.parametrize("name", subsets.one_in(3, [name for name in TRAININGS if training_of(name).naive != STATE]))
def test_what_a_naive_division_makes_of_it(name: str) -> None:
    """The table bites: a look at the first batch shows nothing, and who believes it gets other numbers."""
    training = replace(training_of(name), counted=None)  # parts count by their samples
    first = distance(by_loop(training, parts=2, fewest=2, steps=1), by_loop(training, steps=1))
    error = distance(by_loop(training, parts=2, fewest=2), by_loop(training))
    right = {RIGHT: (True, True), LATER: (True, False), AT_ONCE: (False, False)}[training.naive]
    assert (first <= TOLERANCE, error <= TOLERANCE) == right, f"{first:.1e} on the first batch, {error:.1e} in the end"
    assert error <= TOLERANCE or error > 1e-3


@pytest.mark.parametrize(
    "name", [name for name in TRAININGS if name not in INNOCENT and training_of(name).before is not None]
)
def test_what_the_script_changes_matters(name: str) -> None:
    """Who takes it as it is at the first step for ever gets other numbers."""
    training = training_of(name)
    change = training.before
    assert change is not None
    frozen = replace(training, before=lambda model, step: change(model, 0))
    assert distance(by_loop(frozen), by_loop(training)) > 1e-3


def test_the_judge_tells_apart() -> None:
    """An error of 1e-8 in one entry of one tensor, a loss that is off, NaN, and a tensor that is missing."""
    truth = by_loop(training_of("weights_in_loss"))
    assert distance(truth, truth) == 0
    for name, value in truth.state.items():
        off = value.clone()
        off.view(-1)[-1] += 1e-8 * value.abs().max()
        assert distance(replace(truth, state={**truth.state, name: off}), truth) > TOLERANCE
        assert distance(replace(truth, state={**truth.state, name: off * math.nan}), truth) == math.inf
    assert distance(replace(truth, losses=[*truth.losses[:-1], truth.losses[-1] * (1 + 1e-8)]), truth) > TOLERANCE
    assert distance(replace(truth, state=dict(list(truth.state.items())[1:])), truth) == math.inf
