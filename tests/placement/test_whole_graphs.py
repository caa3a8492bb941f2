"""Whole graphs, split in any way that the rules offer, compute what they compute whole: every value and gradient."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from polylane.placement.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands
from polylane.sharding.solve import solve
from tests.placement.whole_graphs import compare, random_split, subject
from tests.support import models, subsets

# "branching" has no graph.
NAMES = tuple(name for name in (*models.TINY, *models.CASES) if name != "branching")
DEGREES: tuple[dict[str, int], ...] = ({"tensor": 2}, {"tensor": 3}, {"sequence": 2}, {"sequence": 2, "tensor": 2})


@pytest.mark.parametrize(("name", "degree"), subsets.one_in(4, subsets.pairs(NAMES, [2, 3]), several=True))
def test_any_choice_computes_the_same(name: str, degree: int) -> None:
    case = subject(name)
    shown, offered = case.at(degree)
    compare(case, {"x": random_split(shown, offered, degree, Random(f"{name} {degree}"))})


@pytest.mark.parametrize("name", subsets.one_in(4, NAMES))
def test_any_choices_on_two_axes_compute_the_same(name: str) -> None:
    case, random = subject(name), Random(name)
    splits: dict[str, AxisSplit] = {}
    for axis, degree in (("x", 2), ("y", 2)):
        splits[axis] = random_split(*case.at(degree), degree, random, splits)
    compare(case, splits)


@pytest.mark.parametrize(
    "name, degrees",
    subsets.one_in(
        3,
        [
            pytest.param(name, degrees, marks=[] if i % len(DEGREES) == j else pytest.mark.slow)
            for i, name in enumerate(NAMES)
            for j, degrees in enumerate(DEGREES)
        ],
        several=True,
    ),
)
def test_the_best_choice_computes_the_same(name: str, degrees: dict[str, int]) -> None:
    case = subject(name)
    splits: dict[str, AxisSplit] = {}
    for axis, degree in degrees.items():
        splits[axis] = solve(*case.at(degree), degree, SplitDemands(axis, other_axes=splits))
    compare(case, splits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", NAMES)
def test_many_choices_compute_the_same(name: str, seed: int) -> None:
    case, random = subject(name), Random(f"{name} {seed}")
    degree = random.choice([2, 3, 4])
    compare(case, {"x": random_split(*case.at(degree), degree, random)})
    splits: dict[str, AxisSplit] = {}
    for axis, degree in (("x", random.choice([2, 3])), ("y", 2)):
        splits[axis] = random_split(*case.at(degree), degree, random, splits)
    compare(case, splits)


@pytest.mark.parametrize("wrong", ["inputs", "outputs"])
def test_a_wrong_strategy_is_noticed(wrong: str) -> None:
    """A gradient that is not summed over the ranks, an output that is not: named, with the operator."""
    case = subject("nested")
    shown, offered = case.at(2)
    split = random_split(shown, offered, 2, Random(0))
    step = next(s for s in shown.operators if s.name == "left/linear")
    found = PARTIAL if wrong == "outputs" else REPLICATE_PARTIAL_GRAD
    right = next(
        s
        for s in offered.strategies[step.name]
        if s.share < 1 and found in getattr(s, wrong) and found is not REPLICATE
    )
    broken = replace(right, **{wrong: tuple(REPLICATE if p == found else p for p in getattr(right, wrong))})
    compare(case, {"x": replace(split, strategies={**split.strategies, step.name: right})})
    with pytest.raises(AssertionError, match=r"nested: (value|gradient) of .*left"):
        compare(case, {"x": replace(split, strategies={**split.strategies, step.name: broken})})
