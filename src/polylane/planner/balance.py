"""Balanced cuts: pipeline stages of equal meshes that fit in memory, the slowest as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Exponent of the sum of stage times: a smooth maximum, in which the slowest stage counts most, then the others.
POWER = 8


class BalancedCuts:
    """The best cuts into any number of stages, found for all of them by one dynamic program from the last stage back.

    In 1F1B a stage holds as many microbatches as there are stages from it to the end, so that the best last stages do
    not depend on those before them.

    Args:
        times: seconds of both passes before every position, ascending.
        memory: index of a stage from the end (1: the last) -> running sum of its bytes at every position; None where
            there is no limit.
        limit: most bytes that a stage may need.
        unlimited: the best cuts at the same times without a limit, if they are there already: where they keep it, they
            are the best with it.
    """

    def __init__(
        self,
        times: Array,
        memory: Callable[[int], Array] | None = None,
        limit: float = math.inf,
        unlimited: BalancedCuts | None = None,
    ) -> None:
        self._times, self._memory = times, memory if math.isfinite(limit) else None
        self._limit, self._unlimited = limit, unlimited
        if self._memory is not None and unlimited is None:
            self._unlimited = BalancedCuts(times)
        count = len(times)
        self._places = np.arange(count)
        self._least = np.where(self._places == count - 1, 0.0, np.inf)  # least cost from every position to the end
        # A search keeps the cuts of hundreds of plans: positions take two bytes each where that is enough.
        self._place_type = np.int16 if count < np.iinfo(np.int16).max else np.int64
        self._found: list[tuple[float, NDArray[np.signedinteger]]] = []  # by stages: cost, and first stage's end
        # By stages from the end: the farthest end of a stage from every position, and where that many begin at best.
        self._max_ends: list[NDArray[np.signedinteger]] = []
        self._first_starts = [count - 1]

    def cut_into(self, stages: int) -> list[int] | None:
        """Return the boundaries of the stages as indices into the positions, one more than there are stages.

        Returns:
            None if no cuts keep the memory limit, or there are too few positions.
        """
        if self._memory is not None and self._unlimited is not None:
            ends = self._unlimited.cut_into(stages)
            # What is best of all is best of those that fit; and the search need not find that nothing fits.
            if ends is None or self._keeps_limit(ends):
                return ends
            if self._first_starts[stages] > 0:
                return None
        while len(self._found) < stages:
            self._add_stages(len(self._found) + 1)
        if not math.isfinite(self._found[stages - 1][0]):
            return None
        ends = [0]
        for _, choice in reversed(self._found[:stages]):
            ends.append(int(choice[ends[-1]]))
        return ends

    def _keeps_limit(self, ends: list[int]) -> bool:
        """Return whether all stages between boundaries fit, and find how many stages reach how far."""
        assert self._memory is not None
        stages = len(ends) - 1
        for number in range(len(self._max_ends) + 1, stages + 1):
            memory = self._memory(number)
            max_ends = np.searchsorted(memory, memory + self._limit, side="right") - 1
            self._max_ends.append(max_ends.astype(self._place_type))
            self._first_starts.append(int(np.searchsorted(max_ends, self._first_starts[-1])))
        return all(ends[-k] <= self._max_ends[k - 1][ends[-k - 1]] for k in range(1, stages + 1))

    def _add_stages(self, stages: int) -> None:
        costs = _stage_costs(self._times.tobytes()) + self._least[None, :]
        if self._memory is not None:
            costs[self._places[None, :] > self._max_ends[stages - 1][:, None]] = np.inf
        choice = np.argmin(costs, axis=1)
        self._least = costs[self._places, choice]
        self._found.append((float(self._least[0]), choice.astype(self._place_type)))


# Plans are rated by their times, not by their stages: those of the same times follow each other, more or less.
@lru_cache(maxsize=16)
def _stage_costs(times: bytes) -> Array:
    """Return the cost of every stage, by first and last position, from the bytes of the seconds before positions."""
    seconds = np.frombuffer(times)
    count = len(seconds)
    scale = (seconds[-1] - seconds[0]) / max(count - 1, 1) or 1.0
    # gaps[i, j]: relative time of a stage from position i to j; only j > i is a stage.
    gaps = np.maximum((seconds[None, :] - seconds[:, None]) / scale, 0.0)
    return np.where(np.triu(np.ones((count, count), dtype=bool), 1), gaps**POWER, np.inf)
