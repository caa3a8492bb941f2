"""Curves: columns of step lines, thinned so that a page stays small; the lowest and the highest of a stretch stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MOST_POINTS = 800  # of one curve: more than a screen has pixels to tell apart in a chart

Curve = tuple[list[float], list[float]]  # (steps, values)


def read_number(value: Any) -> float | None:
    """Return a finite number; None for anything else, such as the null that stands for one that is not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def read_curve(lines: Iterable[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> Curve:
    """Return the steps and values of the lines in which there is a number.

    Args:
        lines: of steps or epochs, ascending.
        read: returns the value of a line.
    """
    pairs = ((read_number(line.get("step")), read_number(read(line))) for line in lines)
    points = [(step, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in points], [value for _, value in points]


def thin(curve: Curve, limit: int = MOST_POINTS) -> Curve:
    """Return a curve of at most ``limit`` points: of each stretch of steps the lowest and the highest one stay.

    So no spike is lost, and the first and the last point stay, too.
    """
    steps, values = curve
    if len(steps) <= limit:
        return curve
    picked = {0, len(steps) - 1}
    stretches = max(1, limit // 2 - 1)
    for stretch in range(stretches):
        begin, end = (len(steps) * number // stretches for number in (stretch, stretch + 1))
        indices = range(begin, end)
        picked |= {min(indices, key=values.__getitem__), max(indices, key=values.__getitem__)}
    return [steps[index] for index in sorted(picked)], [values[index] for index in sorted(picked)]


def average(rows: Sequence[tuple[float, Sequence[float]]], limit: int) -> list[tuple[float, list[float]]]:
    """Return means of neighbouring rows, at most ``limit`` of them: (last step, mean of each column).

    Args:
        rows: (step, values of the columns).
        limit: highest number of rows that are returned.
    """
    count = min(limit, len(rows))
    means = []
    for number in range(count):
        part = rows[len(rows) * number // count : len(rows) * (number + 1) // count]
        columns = zip(*(values for _, values in part), strict=True)
        means.append((part[-1][0], [sum(column) / len(part) for column in columns]))
    return means


def round_all(values: Iterable[float], digits: int = 6) -> list[float]:
    """Return numbers to some significant digits: what a chart shows, and no more."""
    return [float(f"{value:.{digits}g}") for value in values]
