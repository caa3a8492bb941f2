"""An integer program, row by row: minimise a sum of costs; solved by branch and bound (HiGHS)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

# Costs are handed over in microseconds: the solver's tolerances are absolute.
SCALE = 1e6

Term = tuple[int, float]


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
        values: of the variables; empty where nothing was found.
        cost: of it.
        gap: how far it may be from the best, relatively.
        status: in words: "optimal", "stopped early", "impossible".
    """

    values: Sequence[float]
    cost: float
    gap: float
    status: str


@dataclass
class Program:
    """Variables from 0 to 1 with costs, and rows that bound sums of them."""

    costs: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    lowest: list[float] = field(default_factory=list)
    _at: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    _bounds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def variable(self, cost: float = 0.0, whole: bool = False, lowest: float = 0.0) -> int:
        """A new variable between ``lowest`` and 1, its number; ``whole``: it is 0 or 1."""
        self.costs.append(cost)
        self.whole.append(int(whole))
        self.lowest.append(lowest)
        return len(self.costs) - 1

    def row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        """lower <= sum of coefficient * variable <= upper."""
        rows, columns, values = self._at
        for variable, coefficient in terms:
            rows.append(len(self._bounds[0]))
            columns.append(variable)
            values.append(coefficient)
        self._bounds[0].append(lower)
        self._bounds[1].append(upper)

    def solve(self, gap: float, limit: float, instead: Sequence[Term] | None = None) -> Solution:
        """The best values of all variables.

        Args:
            gap: relative distance from the best at which to stop.
            limit: seconds after which the best known is taken.
            instead: what to minimise in place of the costs.
        """
        costs = np.array(self.costs) * SCALE
        if instead is not None:
            costs = np.zeros(len(self.costs))
            np.add.at(costs, [v for v, _ in instead], [n for _, n in instead])
        rows, columns, values = self._at
        matrix = csr_array((values, (rows, columns)), shape=(len(self._bounds[0]), len(self.costs)))
        found = milp(
            costs,
            integrality=np.array(self.whole),
            bounds=Bounds(np.array(self.lowest), np.ones(len(self.costs))),
            constraints=LinearConstraint(matrix, np.array(self._bounds[0]), np.array(self._bounds[1])),
            options={"mip_rel_gap": gap, "time_limit": limit},
        )
        if found.x is None:
            return Solution((), float("inf"), float("inf"), "impossible" if found.status == 2 else "stopped early")
        left = float(found.mip_gap or 0.0)
        cost = float(found.fun) / (SCALE if instead is None else 1.0)
        return Solution(found.x, cost, left, "optimal" if found.status == 0 else "stopped early")
