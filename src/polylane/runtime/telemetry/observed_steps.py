"""Observed steps: the steps of a training that are measured closely, as many as a part of its time allows.

What is measured of a step is gathered with its loss, in one vector, to which all workers contribute. So all must know
that a step is observed before they begin it, without a message: each decides by results that all of them have read.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Part of a step's time that measuring may cost, over all steps.
BUDGET = 0.005

# The first step opens connections, and what it costs is no measure of later ones: until some are known, every other.
FIRST_PERIOD = 2
LONGEST_PERIOD = 1000

# Number of the latest observed steps whose median cost counts.
KEPT_COSTS = 5


class ObservedSteps:
    """Decides which steps are observed.

    Args:
        budget: the part of all steps' time that observing may cost.
        longest_period: number of steps of which at least one is observed, whatever that costs.
    """

    def __init__(self, budget: float = BUDGET, longest_period: int = LONGEST_PERIOD) -> None:
        self._budget, self._longest_period = budget, longest_period
        self._period, self._next = min(FIRST_PERIOD, longest_period), 0
        self._shares = deque[float](maxlen=KEPT_COSTS)

    @property
    def period(self) -> int:
        """Number of steps from an observed one to the next."""
        return self._period

    def begin_step(self, step: int) -> bool:
        """Return whether a step is observed; steps are asked about in order, by all workers alike.

        Args:
            step: number of the step, from 0.
        """
        if step < self._next:
            return False
        self._next = step + self._period
        return True

    def follow_cost(self, cost: float, seconds: float) -> None:
        """Take into account what an observed step has cost; all workers do so between the same two steps.

        Args:
            cost: seconds that measuring has cost the slowest worker.
            seconds: duration of a step.
        """
        if seconds > 0:
            self._shares.append(cost / seconds)
            period = math.ceil(statistics.median(self._shares) / self._budget)
            self._period = min(max(period, 1), self._longest_period)
