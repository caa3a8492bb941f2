"""Cuts: where the stages of a pipeline begin, so that each fits in memory and the slowest is as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# The exponent with which stages' times are summed: the slowest counts, then the others.
POWER = 8


class BalancedCuts:
    """The best cuts into any number of stages, found once for all of them, from the last stage back.

    Dynamic programming over positions: a stage holds as many microbatches as there are stages from it to the end, so
    that the best last stages are the same whatever comes before them.

    Args:
        times: running sum at every position, ascending.
        memory: of the stage that is so many from the end (1: the last): a running sum of the bytes that it needs.
        limit: of these bytes.
    """

    def __init__(self, times: Array, memory: Callable[[int], Array], limit: float = math.inf) -> None:
        self._memory, self._limit = memory, limit
        count = len(times)
        scale = (times[-1] - times[0]) / max(count - 1, 1) or 1.0
        gaps = np.maximum((times[None, :] - times[:, None]) / scale, 0.0)
        self._cost = np.where(np.triu(np.ones((count, count), dtype=bool), 1), gaps**POWER, np.inf)
        self._places = np.arange(count)
        self._least = np.where(self._places == count - 1, 0.0, np.inf)  # from every position to the end
        self._found: list[tuple[float, NDArray[np.int64]]] = []  # by stages: from the start, and the ends of firsts

    def cut_into(self, stages: int) -> list[int] | None:
        """Where stages begin and end, as indices into the positions, one more than there are stages.

        Returns:
            None where no cuts keep the limit, or there are too few positions.
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
        every = self._cost + self._least[None, :]
        if math.isfinite(self._limit):
            held = self._memory(stages)
            last = np.searchsorted(held, held + self._limit, side="right") - 1  # that a stage may go to
            every[self._places[None, :] > last[:, None]] = np.inf
        choice = np.argmin(every, axis=1)
        self._least = every[self._places, choice]
        self._found.append((float(self._least[0]), choice))
