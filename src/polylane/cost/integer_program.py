"""A mixed-integer linear program in sparse rows, solved by branch and cut (HiGHS through scipy)."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# The solver's tolerances are absolute, so that costs are scaled to this value for the dearest variable.
DEAREST = 1e6

# Limit on the nodes of the branch-and-bound tree; mostly the relaxation at the root is integral.
NODES = 10_000
# By the status number of scipy's milp.
STATUS = {0: "optimal", 1: "stopped early", 2: "impossible"}

Term = tuple[int, float]

# Solutions of the latest programs, by their content: a search over meshes states the same program again and again.
_solved = OrderedDict[bytes, "IntegerSolution"]()
KEPT = 256  # solutions are small, and a search returns to the latest few


@dataclass(frozen=True)
class IntegerSolution:
    """The solver's result.

    Attributes:
        values: one number per variable, not to be written to; empty where nothing was found.
        cost: sum of costs at ``values``; infinite without a solution.
        secondary_cost: sum of the second objective's terms (bytes) at ``values``.
        gap: relative distance from the best bound; infinite where no solution was found.
        status: one of :data:`STATUS`: "optimal", "stopped early" or "impossible".
    """

    values: Sequence[float]
    cost: float
    secondary_cost: float
    gap: float
    status: str


@dataclass
class IntegerProgram:
    """Variables between 0 and 1 with costs, and rows that bound linear sums of them."""

    costs: list[float] = field(default_factory=list)
    is_integer: list[int] = field(default_factory=list)
    lower_bounds: list[float] = field(default_factory=list)
    _at: tuple[list[int], list[int], list[float]] = field(default_factory=lambda: ([], [], []))
    _bounds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add_variable(self, cost: float = 0.0, whole: bool = False, lowest: float = 0.0) -> int:
        """Add a variable between ``lowest`` and 1 and return its index; ``whole``: it must be 0 or 1."""
        self.costs.append(cost)
        self.is_integer.append(int(whole))
        self.lower_bounds.append(lowest)
        return len(self.costs) - 1

    def add_row(self, terms: Iterable[Term], lower: float, upper: float) -> None:
        """Add the constraint lower <= sum of coefficient * variable <= upper."""
        # Coordinates of a sparse matrix: row, column, value.
        rows, columns, values = self._at
        for variable, coefficient in terms:
            rows.append(len(self._bounds[0]))
            columns.append(variable)
            values.append(coefficient)
        self._bounds[0].append(lower)
        self._bounds[1].append(upper)

    def count_rows(self) -> int:
        """Return the number of constraints."""
        return len(self._bounds[0])

    def remove_rows(self, start: int) -> None:
        """Remove the constraints from ``start`` on."""
        rows = self._at[0]
        while rows and rows[-1] >= start:
            for entries in self._at:
                entries.pop()
        for bounds in self._bounds:
            del bounds[start:]

    def solve(self, gap: float, extra_terms: Sequence[Term] = (), weight: float = 0.0) -> IntegerSolution:
        """Minimise the costs plus ``weight`` times the sum of ``extra_terms``.

        The search is bounded in nodes, not in seconds: it is deterministic, and all ranks that run it find the same. So
        the solution of an equal program, if it is one of the latest that were solved, is returned again.

        Args:
            gap: relative distance from the best bound at which to stop.
            extra_terms: terms of a second objective, as (variable, coefficient).
            weight: factor of the second objective; infinite: only that counts.
        """
        costs = np.array(self.costs, dtype=float)
        extra = np.zeros(len(costs))
        np.add.at(extra, [v for v, _ in extra_terms], [n for _, n in extra_terms])
        stated = [np.array(values, dtype=float) for values in (*self._at, *self._bounds, self.is_integer)]
        stated += [np.array(self.lower_bounds, dtype=float), costs, extra, np.array([gap, weight, NODES])]
        key = _digest(stated)
        solution = _solved.pop(key, None) or self._search(gap, costs, extra, weight)
        _solved[key] = solution
        if len(_solved) > KEPT:
            _solved.popitem(last=False)
        return solution

    def _search(self, gap: float, costs: Any, extra: Any, weight: float) -> IntegerSolution:
        # Imported here: scipy takes half a second, and a training whose operators are not split solves no program.
        from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        rows, columns, values = self._at
        matrix = csr_array((values, (rows, columns)), shape=(len(self._bounds[0]), len(costs)))
        result = milp(
            _scaled(costs + weight * extra if math.isfinite(weight) else extra),
            integrality=np.array(self.is_integer),
            bounds=Bounds(np.array(self.lower_bounds), np.ones(len(costs))),
            constraints=LinearConstraint(matrix, np.array(self._bounds[0]), np.array(self._bounds[1])),
            options={"mip_rel_gap": gap, "node_limit": NODES},
        )
        if result.x is None:
            return IntegerSolution((), math.inf, math.inf, math.inf, STATUS.get(result.status, "stopped early"))
        result.x.flags.writeable = False
        mip_gap = float(result.mip_gap or 0.0)
        return IntegerSolution(
            result.x, float(costs @ result.x), float(extra @ result.x), mip_gap, STATUS[int(result.status > 0)]
        )


def _digest(arrays: Sequence[Any]) -> bytes:
    """Digest arrays with their lengths, so that none can be taken for a part of another."""
    digest = hashlib.sha256(repr([len(array) for array in arrays]).encode())
    for array in arrays:
        digest.update(array.tobytes())
    return digest.digest()


def _scaled(costs: Any) -> Any:
    highest_cost = float(np.max(np.abs(costs), initial=0.0))
    return costs * (DEAREST / highest_cost) if highest_cost > 0 else costs
