"""Scores of predictions: errors, and how well predicted times choose among plans."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# A problem needs that many measured plans.
PLANS = 4


@dataclass(frozen=True)
class Case:
    """Seconds of a step, a speed-up or memory, measured and predicted.

    Attributes:
        name: for reports.
        measured, predicted: in ``unit``.
        problem: what the plan is one answer to.
        unit: of both figures.
        told: whether what was measured is what the predictions rest on: it competes, and its error does not count.
    """

    name: str
    measured: float
    predicted: float
    problem: Hashable = None
    unit: str = "s"
    told: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def mean_error(cases: Iterable[Case]) -> float:
    """Mean of the absolute errors."""
    return mean([abs(case.error) for case in cases if not case.told])


def problems(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that compete, where there are enough of them."""
    found: dict[Hashable, list[Case]] = {}
    for case in cases:
        if case.problem is not None:
            found.setdefault(case.problem, []).append(case)
    return [each for each in found.values() if len(each) >= PLANS]


def regret(cases: Sequence[Case]) -> float:
    """Measured time of the plan that is predicted to be fastest, over the best measured time, less one."""
    return min(cases, key=lambda case: case.predicted).measured / min(case.measured for case in cases) - 1


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, equal values having the mean of theirs; 0 where one side is all equal."""
    a, b = ranks(left), ranks(right)
    middle = (len(a) + 1) / 2
    across = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    scale = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return across / scale if scale else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values have the mean of theirs."""
    ordered = sorted(values)
    first: dict[float, int] = {}
    last: dict[float, int] = {}
    for place, value in enumerate(ordered, 1):
        first.setdefault(value, place)
        last[value] = place
    return [(first[value] + last[value]) / 2 for value in values]


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the sorted values.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("a percentile of nothing")
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0
