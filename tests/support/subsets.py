"""Covering subsets of tables of tests: what stays in `make test`, while `make test-all` runs every entry.

:func:`pairs` keeps every row and every column; :func:`one_in` keeps some rows of a table whose rows pin one law;
:func:`examples` says how many examples Hypothesis tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def pairs(rows: Iterable[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs as parameters; of each row one column is run always, in turn, and the others are slow.

    Args:
        rows: values of the first parameter, each of them covered.
        columns: values of the second parameter; covered if there are at least as many rows.
    """
    return [
        pytest.param(row, column, id=f"{row}-{column}", marks=[] if i % len(columns) == j else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def one_in(n: int, values: Iterable[Any], first: int = 0, *, several: bool = False) -> list[Any]:
    """Every n-th value is run always, from the ``first`` on; the others are slow: for tables that pin one law often.

    Args:
        n: one in so many is kept, of those that are not slow by themselves.
        values: values of a parameter; those that ``pytest.param`` made keep their marks and names.
        first: number of the first that is kept.
        several: each value is the values of several parameters.
    """
    rows = [
        value if isinstance(value, type(pytest.param())) else pytest.param(*value) if several else pytest.param(value)
        for value in values
    ]
    often = [row for row in rows if all(mark.name != "slow" for mark in row.marks)]
    kept = {id(row) for i, row in enumerate(often) if i % n == first}
    return [
        row if id(row) in kept else pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.slow])
        for row in rows
    ]


def except_slow(values: Iterable[Any], slow: Sequence[Any]) -> list[Any]:
    """All values; those of ``slow`` are run by `make test-all` only, for the others cover what is different in them."""
    values = list(values)
    assert all(value in values for value in slow), "what is slow is one of the values"
    return [pytest.param(value, marks=[pytest.mark.slow] if value in slow else []) for value in values]


def examples(most: int, least: int = 3) -> int:
    """Of so many examples of a law a sixth is tried always, others in every run; all of them in `make test-all`."""
    return max(least, most * settings().max_examples // 100)
