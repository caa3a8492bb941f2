"""Batch that follows the noise scale: as large as makes the most progress in a second, with the learning rate along.

Of batches of B samples a step takes a + bB seconds, and a sample is worth (φ + B₀) / (φ + B) at the noise scale φ: the
learning goodput is largest at B = √(a φ / b). Of one batch size a and b are not known apart: where the noise scale is
at least as large as the batch, so that twice the batch loses a third of a sample's worth at most, it is doubled, and
measured. From then on it goes towards the largest goodput, by a factor of two at most, and never below the first batch:
up to that at the lower end of the noise scale's interval, and down to that at its upper end. In between it stays.

All workers decide alike, by numbers that were summed over all of them.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polylane.efficiency.batch_rules import ScalingRule, learning_goodput, learning_rate_factor
from polylane.efficiency.noise_window import NoiseScale

# Measured steps from one decision to the next: enough for a median, and for the noise scale of other weights.
PERIOD = 12
# Steps of a size whose median counts, and the fewest of which it does.
KEPT_TIMES, FEWEST_TIMES = 30, 4
# Relative gain of goodput for which the batch changes: below that it is noise.
WORTHWHILE = 0.03


@dataclass(frozen=True)
class BatchChange:
    """A change of the batch, as a line of metrics.jsonl says it.

    Attributes:
        batch: number of samples of a step from now on.
        noise: the noise scale that decides, in samples; its lower bound where no more is known.
        is_bound: whether it is that bound.
        gain: predicted goodput over that of the batch before; None for a trial, of which nothing is known.
        rate_factor: learning rate from now on, over that of the first batch.
        rate_change: the same over the one until now.
    """

    batch: int
    noise: float
    gain: float | None
    rate_factor: float
    rate_change: float
    is_bound: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain data."""
        return {"size": self.batch, "noise_scale": self.noise, "gain": self.gain, "rate_factor": self.rate_factor}


class GrowingBatch:
    """The batch of a training, which follows its noise scale.

    Args:
        base: number of samples of the first steps, for which the learning rate was chosen.
        largest: most samples that a step may have.
        rule: how the learning rate follows.

    Attributes:
        batch: number of samples of a step at present.
    """

    def __init__(self, base: int, largest: int, rule: ScalingRule) -> None:
        self._base, self._largest, self._rule = base, max(largest, base), rule
        self.batch, self._factor = base, 1.0
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._steps, self._is_new = 0, True

    def add_step(self, seconds: float) -> None:
        """Add a measured step.

        Args:
            seconds: duration of the step before it, a mean over all workers; 0 where it is not known.
        """
        self._steps += 1
        # The step before the first one of a size had another size; and the first one may compile.
        if seconds > 0 and not self._is_new and self._steps > 2:
            self._seconds[self.batch].append(seconds)
        self._is_new = False

    def decide(self, noise: NoiseScale) -> BatchChange | None:
        """Return a change of the batch, which is made; None where it stays.

        Args:
            noise: the noise scale, of the gradients that the optimizer steps along.
        """
        scale = noise.low if noise.scale is None else noise.scale
        if self._steps < PERIOD or not scale:
            return None
        self._steps = 0
        times = {b: statistics.median(s) for b, s in self._seconds.items() if len(s) >= FEWEST_TIMES}
        if self.batch not in times:
            return None
        target, gain = self._choose(times, scale, noise.low or 0.0, noise.high or math.inf)
        if target == self.batch:
            return None
        factor = learning_rate_factor(self._rule, scale, target, self._base)
        change = BatchChange(target, scale, gain, factor, factor / self._factor, noise.scale is None)
        self.batch, self._factor, self._is_new = target, factor, True
        return change

    def _choose(self, times: Mapping[int, float], scale: float, low: float, high: float) -> tuple[int, float | None]:
        """Return the next batch, and its predicted goodput over that of the present one."""
        if len(times) == 1:
            doubled = self._round(2 * self.batch)
            return (doubled if low >= self.batch else self.batch), None
        fixed, each_sample = fit_step_seconds(times)
        ends = [math.sqrt(fixed * end / each_sample) if each_sample > 0 else math.inf for end in (low, high)]
        best = min(max(self.batch, ends[0]), ends[1])
        target = self._round(min(max(best, self.batch / 2), 2 * self.batch))

        def goodput(batch: int) -> float:
            speed = batch / (fixed + each_sample * batch)
            return learning_goodput(speed, low if best > self.batch else scale, batch, self._base)

        gain = goodput(target) / goodput(self.batch)
        return (target, gain) if gain > 1 + WORTHWHILE else (self.batch, None)

    def _round(self, batch: float) -> int:
        """Return the nearest multiple of the first batch that is allowed."""
        return self._base * max(1, min(round(batch / self._base), self._largest // self._base))

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on needs, as plain data."""
        return {"batch": self.batch, "factor": self._factor}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch of an earlier run, whose optimizer has its learning rate.

        Args:
            state: of that run, see :meth:`state`.
        """
        self.batch, self._factor = int(state["batch"]), float(state["factor"])


def fit_step_seconds(times: Mapping[int, float]) -> tuple[float, float]:
    """Return seconds of a step whatever its batch, and of each sample: the line with the least squares, from 0 up.

    Args:
        times: seconds of a step by its number of samples; at least two.
    """
    mean_batch, mean_time = (sum(values) / len(times) for values in (times.keys(), times.values()))
    spread = sum((batch - mean_batch) ** 2 for batch in times)
    slope = sum((batch - mean_batch) * (seconds - mean_time) for batch, seconds in times.items()) / spread
    # Neither is negative: noise of the clock may say so.
    slope = min(max(slope, 0.0), mean_time / mean_batch)
    return max(mean_time - slope * mean_batch, 0.0), slope
