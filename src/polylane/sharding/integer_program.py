"""An integer program, row by row: minimise a sum of costs; solved by branch and bound (HiGHS)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

# The solver's tolerances are absolute: what costs are handed over for the dearest variable.
DEAREST = 1e6

# How many branches are looked at, at most; mostly the first one is whole.
NODES = 10_000
STATUS = {0: "optimal", 1: "stopped early", 2: "impossible"}

Term = tuple[int, float]


@dataclass(frozen=True)
class IntegerSolution:
    """What the solver found.

    Attributes:
        values: of the variables; empty where nothing was found.
        cost: of it.
        secondary_cost: the sum of what else was to be small.
        gap: how far it may be from the best, relatively.
        status: in words: "optimal", "stopped early", "impossible".
    """

    values: Sequence[float]
    cost: float
    secondary_cost: float
    gap: float
    status: str


@dataclass
class IntegerProgram:
    """Variables from 0 to 1 with costs, and rows that bound sums of them."""

    costs: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    lower_bounds: list[float] = field(default_factory=list)
    _at: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    _bounds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add_variable(self, cost: float = 0.0, whole: bool = False, lowest: float = 0.0) -> int:
        """A new variable between ``lowest`` and 1, its number; ``whole``: it is 0 or 1."""
        self.costs.append(cost)
        self.is_integer.append(int(whole))
        self.lower_bounds.append(lowest)
        return len(self.costs) - 1

    def add_row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        """lower <= sum of coefficient * variable <= upper."""
        rows, columns, values = self._at
        for variable, coefficient in terms:
            rows.append(len(self._bounds[0]))
            columns.append(variable)
            values.append(coefficient)
        self._bounds[0].append(lower)
        self._bounds[1].append(upper)

    def solve(self, gap: float, more: Sequence[Term] = (), weight: float = 0.0) -> IntegerSolution:
        """The values of all variables for which the costs, and ``weight`` times the sum of ``more``, are least.

        The search depends on nothing but the program, the time of day neither: all who search find the same.

        Args:
            gap: relative distance from the best at which to stop.
            more: what else is to be small.
            weight: of that; infinite: only that counts.
        """
        costs = np.array(self.costs)
        extra = np.zeros(len(costs))
        np.add.at(extra, [v for v, _ in more], [n for _, n in more])
        rows, columns, values = self._at
        matrix = csr_array((values, (rows, columns)), shape=(len(self._bounds[0]), len(costs)))
        found = milp(
            _scaled(costs + weight * extra if math.isfinite(weight) else extra),
            integrality=np.array(self.is_integer),
            bounds=Bounds(np.array(self.lower_bounds), np.ones(len(costs))),
            constraints=LinearConstraint(matrix, np.array(self._bounds[0]), np.array(self._bounds[1])),
            options={"mip_rel_gap": gap, "node_limit": NODES},
        )
        if found.x is None:
            return IntegerSolution(
                (), float("inf"), float("inf"), float("inf"), STATUS.get(found.status, "stopped early")
            )
        left = float(found.mip_gap or 0.0)
        return IntegerSolution(
            found.x, float(costs @ found.x), float(extra @ found.x), left, STATUS[int(found.status > 0)]
        )


def _scaled(costs: Any) -> Any:
    most = float(np.max(np.abs(costs), initial=0.0))
    return costs * (DEAREST / most) if most > 0 else costs
