"""Integer programs: an equal one has its solution already, and one that differs in anything is solved for itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from polylane.cost.integer_program import IntegerProgram, IntegerSolution


def cover(costs: tuple[float, ...] = (1.0, 1.5, 3.0), lower: float = 1.0, lowest: float = 0.0) -> IntegerProgram:
    """Choose of three variables so that each two sum to ``lower`` at least."""
    program = IntegerProgram()
    for cost in costs:
        program.add_variable(cost, whole=True, lowest=lowest)
    for i, j in ((0, 1), (1, 2), (0, 2)):
        program.add_row([(i, 1.0), (j, 1.0)], lower, 2.0)
    return program


def solve(program: IntegerProgram, weight: float = 0.0) -> IntegerSolution:
    return program.solve(1e-6, [(0, 10.0)], weight)


def test_an_equal_program_has_its_solution_already() -> None:
    assert solve(cover()) is solve(cover())
    assert solve(cover()).values.tolist() == [1, 1, 0]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="read-only"):
        solve(cover()).values[0] = 2.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("other", "cost"),
    [
        (lambda: solve(cover((1.0, 1.5, 0.25))), 1.25),
        (lambda: solve(cover(lower=2.0)), 5.5),
        (lambda: solve(cover(lower=0.0)), 0.0),
        (lambda: solve(cover(lowest=1.0)), 5.5),
        (lambda: solve(cover(), 1.0), 4.5),
        (lambda: solve(cover(), math.inf), 4.5),
    ],
)
def test_one_that_differs_is_solved(other: Callable[[], IntegerSolution], cost: float) -> None:
    assert solve(cover()).cost == 2.5
    assert other().cost == cost


def test_a_row_more_or_less_and_whole_numbers_differ() -> None:
    program = cover()
    assert solve(program).cost == 2.5
    rows = program.count_rows()
    program.add_row([(0, 1.0)], 0.0, 0.0)
    assert solve(program).cost == 4.5
    program.remove_rows(rows)
    assert solve(program).cost == 2.5
    program.is_integer = [0, 0, 0]
    assert solve(program).cost == 2.5
    program.costs = [1.0, 1.0, 1.0]
    assert solve(program).cost == 1.5
