"""Whole graphs, split in any way that the rules offer, compute what they compute whole: every value and gradient."""

from __future__ import annotations

from random import Random

import pytest
from whole_graphs import compare, random_split, subject

import models

# "branching" has no graph.
NAMES = tuple(name for name in (*models.TINY, *models.CASES) if name != "branching")


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_any_choice_computes_the_same(name: str, degree: int) -> None:
    case = subject(name)
    shown, offered = case.at(degree)
    compare(case, {"x": random_split(shown, offered, degree, Random(f"{name}{degree}"))})
