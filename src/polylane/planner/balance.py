"""Balanced cuts: pipeline stages of equal meshes that fit in memory, the slowest as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Callable

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
        memory: index of a stage from the end (1: the last) -> running sum of its bytes at every position.
        limit: most bytes that a stage may need.
    """

    def __init__(self, times: Array, memory: Callable[[int], Array], limit: float = math.inf) -> None:
        self._memory, self._limit = memory, limit
        count = len(times)
        scale = (times[-1] - times[0]) / max(count - 1, 1) or 1.0
        # gaps[i, j]: relative time of a stage from position i to j; only j > i is a stage.
        gaps = np.maximum((times[None, :] - times[:, None]) / scale, 0.0)
        self._cost = np.where(np.triu(np.ones((count, count), dtype=bool), 1), gaps**POWER, np.inf)
        self._places = np.arange(count)
        self._least = np.where(self._places == count - 1, 0.0, np.inf)  # least cost from every position to the end
        self._found: list[tuple[float, NDArray[np.int64]]] = []  # by stages: cost, and first stage's end

    def cut_into(self, stages: int) -> list[int] | None:
        """Return the boundaries of the stages as indices into the positions, one more than there are stages.

        Returns:
            None if no cuts keep the memory limit, or there are too few positions.
        """
        while len(self._found) < stages:
            self._add_stages(len(self._found) + 1)
        if not math.isfinite(self._found[stages - 1][0]):
            return None
        ends = [0]
        for _, choice in reversed(self._found[:stages]):
            ends.append(int(choice[ends[-1]]))
        return ends

    def _add_stages(self, stages: int) -> None:
        costs = self._cost + self._least[None, :]
        if math.isfinite(self._limit):
            memory = self._memory(stages)
            max_ends = np.searchsorted(memory, memory + self._limit, side="right") - 1  # farthest end within the limit
            costs[self._places[None, :] > max_ends[:, None]] = np.inf
        choice = np.argmin(costs, axis=1)
        self._least = costs[self._places, choice]
        self._found.append((float(self._least[0]), choice))
